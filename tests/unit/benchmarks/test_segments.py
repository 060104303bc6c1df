"""`python -m benchmarks.segments` at its smallest size."""

from __future__ import annotations

import json

import pytest

from benchmarks import segments


def test_orders_share_more_than_the_given_one_and_the_numbers_add_up(tmp_path, capsys):
    path = tmp_path / "result.json"
    segments.main(["--requests", "20", "--documents", "8", "--top", "3", "--json", str(path)])
    document = json.loads(path.read_text())
    arms = {arm["name"]: arm for arm in document["arms"]}
    assert list(arms) == ["given", "one by one", "run_batch", "seed", "local search"]
    assert len({arm["tokens"] for arm in arms.values()}) == 1
    shared = {name: arm["shared_tokens"] for name, arm in arms.items()}
    assert shared["given"] < min(shared["one by one"], shared["run_batch"])
    assert shared["run_batch"] <= shared["local search"] < arms["given"]["tokens"]
    printed = capsys.readouterr().out
    assert f"{shared['run_batch']:,}" in printed and "local search" in printed


def test_more_documents_than_there_are_cannot_be_asked_for(capsys):
    with pytest.raises(SystemExit):
        segments.main(["--documents", "3", "--top", "4"])
    assert "--top" in capsys.readouterr().err
