"""What a finished run leaves on disk."""

from __future__ import annotations

from panorgan.workflows.execute import evaluate, train


def test_teachers_are_gone_when_the_model_is_delivered(tiny, tmp_path):
    """N sites hold N teachers each. Resuming and evaluating do without them."""
    experiment = tiny(method={"name": "flkd"}, training={"rounds": 1, "validate_every": 0, "local_steps": 1})
    first = train(experiment, tmp_path / "run")
    assert not list(first.path.rglob("vault"))
    assert not list(first.path.rglob("*teacher*"))
    assert [site.name for site in sorted((first.path / "sites").iterdir())] == ["north", "south"]
    scores = first.scores_file.read_bytes()
    first.scores_file.unlink()  # as if it had been killed while it scored
    for again in (train(experiment, tmp_path / "run", resume=True), evaluate(tmp_path / "run")):
        assert again.scores_file.read_bytes() == scores
