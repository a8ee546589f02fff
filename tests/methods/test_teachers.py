"""Teachers on both sides of the wire: what is kept, who is asked, what is predicted, who gets what."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from refusing import refused
from torch import nn

from panorgan.anatomy import Vocabulary
from panorgan.errors import RunError
from panorgan.federation.tensor_store import DiskTensorStore
from panorgan.methods.base import SiteTools
from panorgan.methods.protocol import MemoryTensorStore, Payload
from panorgan.methods.shared.teachers import ServerTeachers, SiteTeachers, as_teacher
from panorgan.networks import SegmentationNetwork
from panorgan.preparation.store import StoredCase

OWNERS = {"north": ("liver",), "south": ("liver", "spleen"), "west": ("aorta",)}
SHAPE = (4, 3, 2)


class Constant(SegmentationNetwork):
    """Says the same everywhere: one logit per organ, with sigmoids."""

    def __init__(self, organs: tuple[str, ...]) -> None:
        super().__init__(Vocabulary(organs), "sigmoid")
        self.logits = nn.Parameter(torch.rand(len(organs)))  # drawn, as first weights are

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        logits = self.logits.view(1, -1, *(1,) * (image.ndim - 2))
        return logits.expand(len(image), -1, *image.shape[2:])


def says(*probabilities: float) -> dict[str, torch.Tensor]:
    return {"logits": torch.tensor([math.log(p / (1 - p)) for p in probabilities])}


NORTH, SOUTH, WEST = says(0.8), says(0.4, 0.2), says(0.6)


@pytest.fixture
def cases(tmp_path) -> list[StoredCase]:
    """`a` annotates the aorta, `b` nothing."""
    stored = []
    for name, structures in (("a", ("aorta",)), ("b", ())):
        folder = tmp_path / name
        folder.mkdir()
        np.save(folder / "image.npy", np.zeros(SHAPE, dtype=np.float16))
        stored.append(StoredCase(name, name, "east", structures, folder))
    return stored


def site_teachers(cases=(), tensor_store=None, inference_key="", owners=OWNERS) -> SiteTeachers:
    model = Constant(("liver",))
    tools = SiteTools(
        model,
        torch.optim.SGD(model.parameters()),
        tensor_store=MemoryTensorStore() if tensor_store is None else tensor_store,
        cases=cases,
        inference_key=inference_key,
    )
    return SiteTeachers(tools, lambda site: Constant(owners[site]), owners)


def named(**teachers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"teacher/{site}/{key}": value for site, tensors in teachers.items() for key, value in tensors.items()}


def without_label(case: StoredCase) -> tuple[str, ...]:
    return tuple(organ for organ in ("aorta", "liver", "pancreas", "spleen") if organ not in case.structures)


# -- at a site -----------------------------------------------------------------------------------------------------


def test_teachers_are_kept_and_the_rest_is_left_to_the_rule():
    site = site_teachers()
    rest = site.receive(Payload({"encoder.w": torch.ones(1), **named(north=NORTH, south=SOUTH)}, {"scale": 2.0}))
    assert list(rest.tensors) == ["encoder.w"]
    assert rest.scalars == {"scale": 2.0}
    tensor_store = site.tools.tensor_store
    assert tensor_store.names() == ("teacher/north", "teacher/south")
    assert torch.equal(tensor_store.get("teacher/south")["logits"], SOUTH["logits"])


def test_who_knows_what():
    site = site_teachers()
    assert site.known() == ()
    site.receive(Payload(named(south=SOUTH)))
    assert site.known() == ("liver", "spleen")
    site.keep("north", NORTH)
    assert site.sites_knowing("liver") == ("north", "south")
    assert site.sites_knowing("aorta") == ()


def test_a_restart_finds_the_teachers(tmp_path):
    site_teachers(tensor_store=DiskTensorStore(tmp_path)).receive(Payload(named(south=SOUTH)))
    assert site_teachers(tensor_store=DiskTensorStore(tmp_path)).known() == ("liver", "spleen")


class Softmax(Constant):
    """Background 0.2, liver 0.3, spleen 0.1, aorta 0.4, wherever it looks."""

    def __init__(self) -> None:
        super().__init__(("liver", "spleen", "aorta"))
        self.activation = "softmax"
        self.logits = nn.Parameter(torch.tensor([0.2, 0.3, 0.1, 0.4]).log())


@pytest.mark.parametrize(
    ("taught", "expected"),
    [(("liver", "spleen"), {"liver": 85, "spleen": 36}), (("liver", "spleen", "aorta"), {"aorta": 170})],
)
def test_an_exclusive_teacher_is_heard_against_all_that_it_was_not_taught(cases, taught, expected):
    """Taught liver and spleen: neither has 0.2 + 0.4. Liver 0.3/(0.3 + 0.6) = ⅓, spleen 0.1/0.7 = ⅐: 255 p = 85, 36.

    Had it been taught the aorta too, the aorta (0.4 of 0.4 + 0.2) would be claimed, though it has less than one half.
    """
    site = site_teachers(cases, owners={"south": tuple(expected)})
    site.taught = {"south": taught}
    site._build = lambda _: Softmax()
    site.receive(Payload({f"teacher/south/{k}": v for k, v in Softmax().state_dict().items()}))
    volume, names = site.predictions(lambda case: tuple(expected)).volume(cases[1])
    assert {name: int(volume[place].max()) for place, name in enumerate(names)} == expected
    assert (volume.max((1, 2, 3)) == volume.min((1, 2, 3))).all()


def test_an_organ_is_the_mean_of_the_teachers_that_know_it(cases):
    """Liver (0.8 + 0.4)/2 = 0.6, spleen 0.2, aorta 0.6; the pancreas has no teacher. 255 p = 153, 51, 153."""
    site = site_teachers(cases)
    site.receive(Payload(named(north=NORTH, south=SOUTH, west=WEST)))
    predicted = site.predictions(without_label)
    predicted.ensure()
    assert predicted.names == ("aorta", "liver", "spleen")
    volume, names = predicted.volume(cases[1])
    assert dict(zip(names, volume[:, 0, 0, 0].tolist(), strict=True)) == {"aorta": 153, "liver": 153, "spleen": 51}
    volume, names = predicted.volume(cases[0])
    assert dict(zip(names, volume[:, 3, 2, 1].tolist(), strict=True)) == {"liver": 153, "spleen": 51}
    fresh, _ = site.predictions(without_label, cached=False).volume(cases[1])
    np.testing.assert_allclose(fresh[:, 1, 1, 1], [0.6, 0.6, 0.2], atol=1e-6)


def test_only_teachers_that_are_needed_are_asked_and_none_stays_in_memory(cases):
    """West knows the aorta alone, which `a` annotates itself."""
    site = site_teachers(cases[:1])
    site.receive(Payload(named(north=NORTH, south=SOUTH, west=WEST)))
    asked: list[tuple[str, ...]] = []
    predict = site.tools.predict

    def watched(network: SegmentationNetwork, image: torch.Tensor) -> torch.Tensor:
        asked.append(network.channels)
        assert not network.training
        assert not any(parameter.requires_grad for parameter in network.parameters())
        return predict(network, image)

    site.tools.predict = watched
    predicted = site.predictions(without_label)
    panel = predicted.release.__self__
    predicted.ensure()
    assert asked == [("liver",), ("liver", "spleen")]
    assert not panel._networks
    site.predictions(without_label).ensure()
    assert len(asked) == 2, "what is stored is not predicted again"


def stored(cases) -> set[Path]:
    return {path for case in cases for path in case.folder.glob("companion-*")}


def test_whatever_changes_a_prediction_gives_it_a_new_file(cases):
    def files(inference_key="", owners=OWNERS, **teachers) -> set[Path]:
        site = site_teachers(cases, inference_key=inference_key, owners=owners)
        site.receive(Payload(named(**{"north": NORTH, **teachers})))
        before = stored(cases)
        site.predictions(without_label).ensure()
        return stored(cases) - before

    assert len(files()) == 2
    assert files() == set(), "the same again"
    assert len(files(north=says(0.9))) == 2
    assert len(files(south=SOUTH)) == 2
    assert len(files(inference_key="overlap 0.9")) == 2
    assert len(files(owners={"north": ("spleen",)})) == 2, "the same weights of a network for another organ"


def test_a_teacher_that_is_replaced_is_asked_again(cases):
    site = site_teachers(cases)
    site.keep("north", NORTH)
    site.predictions(without_label).ensure()
    site.keep("north", says(0.2))
    volume, _ = site.predictions(without_label).volume(cases[0])
    assert set(np.unique(volume)) == {51}


def test_nobodys_random_draws_notice(cases):
    """With the cache full or empty, training draws the same numbers."""
    site = site_teachers(cases)
    site.keep("north", NORTH)
    before = torch.get_rng_state()
    site.predictions(without_label).ensure()
    assert torch.equal(torch.get_rng_state(), before)


# -- at the server -------------------------------------------------------------------------------------------------


class Answers:
    """Updates of one round."""

    def __init__(self, **tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.sites = sorted(tensors)

    def keys(self, site):
        return list(self._tensors[site])

    def tensor(self, site, key):
        return self._tensors[site][key]


@pytest.fixture
def server() -> ServerTeachers:
    teachers = ServerTeachers(MemoryTensorStore())
    teachers.collect(Answers(north=as_teacher(NORTH), south={**as_teacher(SOUTH), "encoder.w": torch.ones(1)}, west={}))
    return teachers


def test_every_teacher_is_kept_by_site(server):
    assert server.tensor_store.names() == ("teacher/north", "teacher/south")
    assert list(server.tensor_store.get("teacher/south")) == ["logits"]


def test_a_site_gets_the_others_teachers_until_it_has_them(server):
    assert list(server.for_site("north")) == ["teacher/south/logits"]
    assert list(server.for_site("west")) == ["teacher/north/logits", "teacher/south/logits"]
    server.mark_delivered(["north", "south"])
    assert server.for_site("north") == {}
    assert server.up_to_date == ("north", "south")
    assert len(server.for_site("west")) == 2, "it missed the exchange"
    assert len(server.for_site("newcomer")) == 2
    server.mark_delivered(["west"])
    assert server.for_site("west") == {}


def test_who_has_what_survives_a_restart(server):
    server.mark_delivered(["north"])
    again = ServerTeachers(server.tensor_store)
    again.load({"scale": 3.0, **server.numbers()})
    assert again.for_site("north") == {}
    assert list(again.for_site("south")) == ["teacher/north/logits"]
    assert again.numbers() == server.numbers()


def test_a_later_teacher_reaches_those_who_have_the_others(server):
    server.mark_delivered(["north", "south", "west"])
    server.collect(Answers(west=as_teacher(WEST)))
    assert list(server.for_site("north")) == ["teacher/west/logits"]
    assert server.for_site("west") == {}
    assert server.up_to_date == ("west",)


def test_what_reached_the_vault_but_no_checkpoint_is_not_given_away(server):
    """A kill in between: the round is repeated, and until then it is not reported."""
    before = ServerTeachers(server.tensor_store)
    before.load({})
    assert before.for_site("north") == {}
    assert before.request_flags("north") == {}


def test_a_site_that_lost_its_teachers_says_so(server):
    """Silently training on with fewer teachers would be the worse mistake."""
    site = site_teachers()
    site.receive(Payload(server.for_site("west"), server.request_flags("west")))
    site.receive(Payload({}, server.request_flags("west")))
    with refused("teachers-missing", RunError) as caught:
        site_teachers().receive(Payload({}, server.request_flags("west")))
    assert "north, south" in caught.value.what
    assert caught.value.fix


def test_a_site_that_lost_its_own_teacher_says_so(server):
    site = site_teachers()
    site.keep("north", NORTH)
    site.receive(Payload(server.for_site("north"), server.request_flags("north")))
    with refused("teachers-missing", RunError) as caught:
        site_teachers().receive(Payload(server.for_site("north"), server.request_flags("north")))
    assert "south" not in caught.value.what


# -- teachers that did not arrive ----------------------------------------------------------------------------------


def test_who_owes_a_teacher_is_asked_until_it_answers(server):
    server.mark_due(["east", "north", "south", "west"])
    assert server.due_sites == ("east", "west"), "the others have sent theirs"
    assert "send_teacher" in server.request_flags("west")
    server.collect(Answers(north={}))
    assert server.due_sites == ("east", "west")
    server.collect(Answers(east={}, west=as_teacher(WEST)))
    assert server.due_sites == (), "one has sent it, one has none"
    assert server.sites == ("north", "south", "west")
    assert server.request_flags("west") == server.request_flags("north") == server.request_flags("newcomer")


def test_who_owes_survives_a_restart(server):
    server.mark_due(["north", "west"])
    again = ServerTeachers(server.tensor_store)
    again.load(server.numbers())
    assert again.due_sites == ("west",)
    assert again.numbers() == server.numbers()


def test_a_site_sends_its_teacher_when_it_is_asked_and_has_one(server):
    server.mark_due(["west"])
    site = site_teachers()
    site.receive(Payload(server.for_site("west"), server.request_flags("west")))
    assert site.asked
    assert site.requested("west") == {}
    site.keep("west", WEST)
    assert torch.equal(site.requested("west")["teacher/logits"], WEST["logits"])
    server.collect(Answers(west=as_teacher(WEST)))
    site.receive(Payload({}, server.request_flags("west")))
    assert site.requested("west") == {}


def test_what_a_site_may_send_has_shapes_and_no_values(server):
    examples = server.expects({"a.w": torch.ones(2, 3), "steps": torch.tensor(1)})
    assert {key: (value.shape, value.dtype, value.device.type) for key, value in examples.items()} == {
        "teacher/a.w": ((2, 3), torch.float32, "meta"),
        "teacher/steps": ((), torch.int64, "meta"),
    }
