# panorgan in an image, from the wheel that `make wheel` built. For a CPU:
#   make wheel && docker build -t panorgan .
# For NVIDIA GPUs (PyPI's build of PyTorch brings CUDA; the host needs the driver and the container toolkit):
#   docker build -t panorgan:cuda --build-arg TORCH_INDEX=https://pypi.org/simple .
#   docker run --rm --gpus all -v "$PWD:/work" panorgan:cuda train experiment.yaml
# A tag can be moved by its owner, a digest cannot: pin BASE to python@sha256:… where it matters.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /tmp/panorgan
COPY requirements.txt requirements-network.txt requirements-dicom.txt requirements-torch.txt ./
COPY scripts/check_hashes.py scripts/
COPY build/dist/*.whl ./
# The same files, by their hashes, as `make venv` installs; PyTorch's build depends on the machine and is checked afterwards.
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements.txt -r requirements-network.txt \
      -r requirements-dicom.txt \
 && pip install --no-cache-dir --report torch.json --index-url "${TORCH_INDEX}" --extra-index-url https://pypi.org/simple \
      "$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements-torch.txt)" \
 && python scripts/check_hashes.py torch.json requirements-torch.txt \
 && pip install --no-cache-dir --no-deps ./*.whl \
 && panorgan --version
# Not root: what is written into mounted folders belongs to this user; `docker run --user` chooses another.
RUN useradd --create-home --uid 1000 panorgan
USER panorgan
ENV PANORGAN_CACHE=/home/panorgan/cache PYTHONSAFEPATH=1
WORKDIR /work
ENTRYPOINT ["panorgan"]
CMD ["--help"]
