"""What a finished run leaves on disk."""

from __future__ import annotations

from panorgan.runs.execute import evaluate, train


def test_teachers_are_gone_when_the_model_is_delivered(tiny, tmp_path):
    """N sites hold N teachers each. Resuming and evaluating do without them."""
    experiment = tiny(method={"name": "flkd"}, training={"rounds": 1, "validate_every": 0, "local_steps": 1})
    first = train(experiment, tmp_path / "run")
    assert not list(first.folder.path.rglob("vault"))
    assert not list(first.folder.path.rglob("*teacher*"))
    assert [site.name for site in sorted((first.folder.path / "sites").iterdir())] == ["north", "south"]
    first.folder.metrics.unlink()  # as if it had been killed while it scored
    again = train(experiment, tmp_path / "run", resume=True)
    assert again.rows == first.rows
    assert evaluate(tmp_path / "run").rows == first.rows
