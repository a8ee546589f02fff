"""STOW-RS and WADO-RS against a real archive on the loopback interface."""

from __future__ import annotations

import datetime
import json
import stat
import sys
from pathlib import Path

import numpy as np
import pydicom
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from loopback import free_port
from made_predictions import made_prediction, read_contours, read_seg
from orthanc import PASSWORD, USER, needs_orthanc, running
from refusing import refused
from stub_archive import answering, stored

from panorgan.data.volume import read_scan
from panorgan.workflows.dicomweb import DicomWebServer, RemoteSeries
from panorgan.workflows.dicomweb_access import Access

KNOWN = Access(user=USER, password=PASSWORD)


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    with running(tmp_path_factory.mktemp("orthanc")) as one:
        yield one


@needs_orthanc
@pytest.mark.slow
def test_results_are_stored_and_read_back_exactly(archive, tmp_path):
    made = made_prediction(tmp_path / "ct", PatientID="store")
    stem = made.saved(tmp_path, "dicom-seg,rtstruct")
    files = [Path(f"{stem}.seg.dcm"), Path(f"{stem}.rtstruct.dcm")]
    archive.upload(*made.series.files)
    DicomWebServer(archive.url, KNOWN).store(files)
    labels, affine = made.prediction.labels, made.prediction.affine
    for file, read in zip(files, (read_seg, read_contours), strict=True):
        back = archive.fetch(pydicom.dcmread(file).SOPInstanceUID, tmp_path / "back.dcm")
        np.testing.assert_array_equal(read(back, affine, labels.shape), labels)
    study = made.series.slices[0].StudyInstanceUID
    found = DicomWebServer(archive.url, KNOWN).list_series(study)
    assert sorted(one.modality for one in found) == ["CT", "RTSTRUCT", "SEG"], "in the study of the images"


@needs_orthanc
@pytest.mark.slow
@pytest.mark.parametrize("big", [False, True])
def test_a_body_of_more_than_a_megabyte_arrives(archive, tmp_path, big):
    """The client sends it in chunks then."""
    labels = np.ones((400, 300, 80 if big else 1), np.uint8)
    made = made_prediction(tmp_path / "ct", labels, organs=["liver"], PatientID=f"big-{big}")
    stem = made.saved(tmp_path, "dicom-seg")
    assert (Path(f"{stem}.seg.dcm").stat().st_size > 1_000_000) == big
    DicomWebServer(archive.url, KNOWN).store([Path(f"{stem}.seg.dcm")])
    uid = pydicom.dcmread(f"{stem}.seg.dcm").SOPInstanceUID
    back = pydicom.dcmread(archive.fetch(uid, tmp_path / "back.dcm"))
    assert back.pixel_array.all()


@needs_orthanc
@pytest.mark.slow
def test_a_series_is_fetched_whole_into_a_private_folder_that_is_removed(archive, tmp_path):
    made = made_prediction(tmp_path / "ct", PatientID="fetch")
    other = made_prediction(
        tmp_path / "other", StudyInstanceUID=made.series.slices[0].StudyInstanceUID, SeriesNumber=8, PatientID="fetch"
    )
    archive.upload(*made.series.files, *other.series.files)
    server, study = DicomWebServer(archive.url, KNOWN), made.series.slices[0].StudyInstanceUID
    wanted = read_scan(tmp_path / "ct")
    for name in (made.series.uid, "3"):
        with server.fetched(study, [name]) as folder:
            (series,) = folder.iterdir()
            assert series.name == made.series.uid
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            found = read_scan(series)
            np.testing.assert_array_equal(found.voxels, wanted.voxels)
            np.testing.assert_array_equal(found.affine, wanted.affine)
        assert not folder.exists()
    with server.fetched(study) as folder:
        assert {one.name for one in folder.iterdir()} == {made.series.uid, other.series.uid}


@needs_orthanc
@pytest.mark.slow
def test_a_compressed_series_stays_as_it_is(archive, tmp_path):
    made = made_prediction(tmp_path / "ct", PatientID="compressed")
    for path in made.series.files:
        one = pydicom.dcmread(path)
        one.compress("1.2.840.10008.1.2.5", generate_instance_uid=False)  # run lengths
        one.save_as(path)
    archive.upload(*made.series.files)
    first = made.series.slices[0]
    with DicomWebServer(archive.url, KNOWN).fetched(first.StudyInstanceUID) as folder:
        files = sorted(folder.rglob("*.dcm"))
        assert {pydicom.dcmread(path).file_meta.TransferSyntaxUID for path in files} == {"1.2.840.10008.1.2.5"}
        np.testing.assert_array_equal(read_scan(files[0].parent).voxels, read_scan(tmp_path / "ct").voxels)


@needs_orthanc
@pytest.mark.slow
def test_studies_and_series_that_are_not_there_are_named(archive, tmp_path):
    made = made_prediction(tmp_path / "ct", PatientID="absent", SeriesDescription="Thorax")
    archive.upload(*made.series.files)
    server, study = DicomWebServer(archive.url, KNOWN), made.series.slices[0].StudyInstanceUID
    with refused("dicomweb-no-such-series") as caught, server.fetched(study, ["4"]):
        pass
    assert made.series.uid in caught.value.why
    assert "Thorax" in caught.value.why
    with refused("dicomweb-no-such-series"), server.fetched("1.2.3.4.5.6"):
        pass


@needs_orthanc
@pytest.mark.slow
@pytest.mark.parametrize("access", [Access(), Access(user=USER, password="wrong"), Access(token="wrong")])
def test_who_is_not_known_is_refused(archive, tmp_path, access):
    made = made_prediction(tmp_path / "ct")
    stem = made.saved(tmp_path, "dicom-seg")
    server = DicomWebServer(archive.url, access)
    with refused("dicomweb-refused") as caught:
        server.store([Path(f"{stem}.seg.dcm")])
    assert "wrong" not in str(caught.value)
    with refused("dicomweb-refused"):
        server.list_series("1.2.3")


@needs_orthanc
@pytest.mark.slow
def test_an_object_that_the_archive_cannot_take_is_not_stored(archive, tmp_path):
    """Without a study and a series of its own."""
    made = made_prediction(tmp_path / "ct", PatientID="broken")
    broken = pydicom.dcmread(f"{made.saved(tmp_path, 'dicom-seg')}.seg.dcm")
    for name in ("StudyInstanceUID", "SeriesInstanceUID"):
        delattr(broken, name)
    broken.save_as(tmp_path / "broken.dcm")
    with refused("dicomweb-not-stored"):
        DicomWebServer(archive.url, KNOWN).store([tmp_path / "broken.dcm"])


@needs_orthanc
@pytest.mark.slow
def test_another_address_of_the_archive_is_no_dicomweb_service(archive):
    with refused("dicomweb-failed"):
        DicomWebServer(f"{archive.root}/elsewhere", KNOWN).list_series("1.2.3")


def test_a_server_that_is_not_there_is_unreachable():
    with refused("dicomweb-unreachable"):
        DicomWebServer(f"http://127.0.0.1:{free_port()}/dicom-web", Access()).list_series("1.2.3")


# -- what a server may answer ------------------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path):
    """Two DICOM files, with their UIDs."""
    made = made_prediction(tmp_path / "ct", np.ones((4, 3, 2), np.uint8), organs=["liver"])
    stem = made.saved(tmp_path, "dicom-seg,rtstruct")
    files = [Path(f"{stem}.seg.dcm"), Path(f"{stem}.rtstruct.dcm")]
    return files, [str(pydicom.dcmread(file).SOPInstanceUID) for file in files]


def test_what_was_stored_in_part_is_named_with_the_reason(results):
    files, (first, second) = results
    answer = stored([first], {second: 0xA700})
    with answering(status=202, body=answer) as stub, refused("dicomweb-partly-stored") as caught:
        DicomWebServer(stub.url, Access()).store(files)
    assert caught.value.why == "scan.rtstruct.dcm: failure reason 0xA700"
    with answering(status=200, body=stored([second], {})) as stub, refused("dicomweb-partly-stored") as caught:
        DicomWebServer(stub.url, Access()).store(files)
    assert caught.value.why.startswith("scan.seg.dcm: ")


@pytest.mark.parametrize("status", [200, 202, 409])
def test_where_all_failed_nothing_is_said_to_be_stored(results, status):
    files, (first, second) = results
    answer = stored([], {first: 0x0110, second: 0x0122})
    with answering(status=status, body=answer) as stub, refused("dicomweb-not-stored") as caught:
        DicomWebServer(stub.url, Access()).store(files)
    assert "0x0110" in caught.value.why
    assert "0x0122" in caught.value.why


@pytest.mark.parametrize("body", [b"", b"{}"])
def test_a_short_answer_means_that_all_is_stored(results, body):
    with answering(body=body) as stub:
        DicomWebServer(stub.url, Access()).store(results[0])
    assert [line for line, _ in stub.asked] == ["POST /dicom-web/studies"]


@pytest.mark.parametrize(
    ("status", "code"),
    [(401, "dicomweb-refused"), (403, "dicomweb-refused"), (404, "dicomweb-failed"), (503, "dicomweb-failed")],
)
def test_refusals_are_told_apart_and_nothing_is_repeated(results, status, code):
    with answering(status=status) as stub, refused(code):
        DicomWebServer(stub.url, Access()).store(results[0])
    assert len(stub.asked) == 1


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b'[{"0020000E": 7}]', b"{}"])
def test_an_answer_that_is_not_dicom_is_no_list_of_series(body):
    with answering(body=body) as stub, refused("dicomweb-failed"):
        DicomWebServer(stub.url, Access()).list_series("1.2.3")


@pytest.mark.parametrize("uid", ["../../outside", "..", "1/2", ""])
def test_a_uid_that_would_lead_out_of_the_folder_is_refused(uid):
    listed = [{"0020000E": {"vr": "UI", "Value": [uid]}, "00080060": {"vr": "CS", "Value": ["CT"]}}]
    with answering(body=json.dumps(listed).encode()) as stub, refused("dicomweb-failed"):
        DicomWebServer(stub.url, Access()).list_series("1.2.3")


def test_a_server_that_says_nothing_is_given_up():
    with answering(silent=True) as stub, refused("dicomweb-timeout"):
        DicomWebServer(stub.url, Access(), timeout=(5, 0.2)).list_series("1.2.3")


def test_a_series_that_arrives_short_is_refused(tmp_path):
    """A list that promises five images, and an answer that holds none."""
    made = made_prediction(tmp_path / "ct")
    listed = [{
        "0020000E": {"vr": "UI", "Value": [made.series.uid]},
        "00080060": {"vr": "CS", "Value": ["CT"]},
        "00201209": {"vr": "IS", "Value": [5]},
    }]  # fmt: skip
    first = made.series.files[0].read_bytes()
    one = b"--b\r\nContent-Type: application/dicom\r\n\r\n" + first + b"\r\n--b--\r\n"
    with answering(body=json.dumps(listed).encode()) as stub:
        server = DicomWebServer(stub.url, Access())
        (series,) = server.list_series("1.2.3")
        stub.body, stub.kind = one, 'multipart/related; type="application/dicom"; boundary=b'
        with refused("dicomweb-incomplete") as caught:
            server._fetch("1.2.3", series, tmp_path / "got")
    assert caught.value.why.startswith("1 of 5 ")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"--b\r\nContent-Type: application/dicom\r\n\r\nno DICOM\r\n--b--\r\n", "multipart/related; boundary=b"),
        (b"<html>", "text/html"),
    ],
)
def test_what_arrives_and_is_no_dicom_is_refused(tmp_path, body, kind):
    series = RemoteSeries("1.2.3.4", "CT", "1", "", None)
    with answering(body=body, kind=kind) as stub, refused("dicomweb-failed"):
        DicomWebServer(stub.url, Access())._fetch("1.2.3", series, tmp_path / "got")


def test_a_full_disk_is_not_the_servers_fault(tmp_path, monkeypatch):
    made = made_prediction(tmp_path / "ct")
    body = b"--b\r\nContent-Type: application/dicom\r\n\r\n" + made.series.files[0].read_bytes() + b"\r\n--b--\r\n"

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pydicom.Dataset, "save_as", full)
    series = RemoteSeries("1.2.3.4", "CT", "1", "", None)
    with (
        answering(body=body, kind='multipart/related; type="application/dicom"; boundary=b') as stub,
        pytest.raises(OSError, match="No space"),
    ):
        DicomWebServer(stub.url, Access())._fetch("1.2.3", series, tmp_path / "got")


def test_a_token_is_sent_as_such_and_nothing_without_one(tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login other password other")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with answering() as stub:
        DicomWebServer(stub.url, Access(token="abc")).list_series("1.2.3")
        assert stub.asked[-1][1]["Authorization"] == "Bearer abc"
        monkeypatch.setenv("NETRC", str(tmp_path / "none"))
        DicomWebServer(stub.url, Access()).list_series("1.2.3")
        assert "Authorization" not in stub.asked[-1][1]


def test_without_the_client_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "dicomweb_client", None)
    with refused("dicomweb-missing") as caught:
        DicomWebServer("https://pacs.example/dicom-web", Access()).list_series("1.2.3")
    assert "dicom-out" in caught.value.fix


# -- certificates ------------------------------------------------------------------------------------------------------


def certificate(folder: Path) -> tuple[Path, Path]:
    """A hospital's own: a file with key and certificate for the server, and the certificate alone."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    public = made.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    (folder / "server.pem").write_bytes(secret + public)
    (folder / "ca.pem").write_bytes(public)
    return folder / "server.pem", folder / "ca.pem"


def test_a_certificate_that_nobody_vouches_for_is_refused_until_its_authority_is_named(tmp_path, monkeypatch):
    both, ca = certificate(tmp_path)
    with answering(both) as stub:
        with refused("dicomweb-certificate"):
            DicomWebServer(stub.url, KNOWN).list_series("1.2.3")
        assert stub.asked == [], "nothing is said before the server has proved who it is"
        trusting = Access(user=USER, password=PASSWORD, ca=ca)
        assert DicomWebServer(stub.url, trusting).list_series("1.2.3") == []
        assert stub.asked[-1][1]["Authorization"].startswith("Basic ")
        # The name in the certificate is verified too.
        with refused("dicomweb-certificate"):
            DicomWebServer(stub.url.replace("localhost", "127.0.0.1"), trusting).list_series("1.2.3")
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(ca))
        assert DicomWebServer(stub.url, KNOWN).list_series("1.2.3") == []
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "server.pem"))
        assert DicomWebServer(stub.url, trusting).list_series("1.2.3") == []
