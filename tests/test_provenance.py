"""Provenance names the code that measured, and the keys that must agree."""

from moeplan.provenance import MUST_AGREE, disagreements, environment


def test_environment_names_the_code() -> None:
    facts = environment()
    assert len(facts["source_sha256"]) == 64
    assert "commit" in facts or "version" in facts


def test_disagreements_list_every_key_that_differs() -> None:
    one = {key: "a" for key in MUST_AGREE}
    assert disagreements(one, dict(one)) == []
    for key in MUST_AGREE:
        assert disagreements(one, one | {key: "b"}) == [f"{key}: a != b"]
