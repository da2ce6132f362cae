import os
from dataclasses import dataclass, field

import pytest
from datasets import Dataset, DatasetDict

from trl import ScriptArguments, TrlParser, get_dataset


@dataclass
class Options:
    rate: float = 0.5
    steps: int = 3
    name: str = "plain"
    shuffle: bool = True
    verbose: bool | None = None
    kind: str = field(default="a", metadata={"choices": ("a", "b")})
    weights: list[float] | None = None
    limit: int | None = 7
    extra: dict | str | None = None
    report_to: None | str | list[str] = None  # noqa: RUF036  written in this order in transformers
    multiple: int | str | None = "auto"


@pytest.fixture
def write(tmp_path):
    """Write a YAML file and return the flags that give it."""

    def write(text: str) -> list[str]:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return ["--config", str(path)]

    return write


def parse(args, **kwargs):
    return TrlParser(Options).parse_args_and_config(args, **kwargs)[0]


def test_without_a_file_flags_are_parsed():
    assert parse(["--rate", "2", "--weights", "1", "-0.5"]) == Options(rate=2.0, weights=[1.0, -0.5])


def test_the_file_gives_options(write):
    config = write(
        """
        rate: 1e-5
        steps: 4
        name: 2024
        shuffle: false
        verbose: true
        kind: b
        weights: [1, -2.5]
        limit: null
        extra: {temperature: 0.7, stop: [a, b]}
        report_to: [here, there]
        multiple: 8
        """
    )
    assert parse(config) == Options(
        rate=1e-5,
        steps=4,
        name="2024",
        shuffle=False,
        verbose=True,
        kind="b",
        weights=[1.0, -2.5],
        limit=None,
        extra={"temperature": 0.7, "stop": ["a", "b"]},
        report_to=["here", "there"],
        multiple=8,
    )


def test_flags_override_the_file(write):
    config = write("{rate: 0.1, steps: 4, shuffle: true, weights: [1, 2], limit: null}")
    options = parse(["--steps", "5", *config, "--no_shuffle", "--weights", "3", "--limit", "9"])
    assert options == Options(rate=0.1, steps=5, shuffle=False, weights=[3.0], limit=9)


def test_a_single_value_may_stand_for_a_list(write):
    assert parse(write("weights: 2")).weights == [2.0]


def test_an_empty_list_is_kept(write):
    assert parse(write("weights: []")).weights == []


def test_an_empty_file_changes_nothing(write):
    assert parse(write("")) == Options()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: many", "argument --steps: invalid int value: 'many'"),
        ("steps: 1.5", "argument --steps: invalid int value: '1.5'"),
        ("kind: c", "argument --kind: invalid choice: 'c'"),
        ("shuffle: 2", "argument --shuffle: Truthy value expected"),
        ("weights: [1, x]", "argument --weights: invalid float value: 'x'"),
    ],
)
def test_values_of_the_file_are_checked_as_flags_are(write, capsys, text, message):
    with pytest.raises(SystemExit) as info:
        parse(write(text))
    said = capsys.readouterr().err
    assert info.value.code == 2
    assert message in said
    assert "usage:" not in said


@pytest.mark.parametrize("text", ["steps: [1, 2]", "steps: {a: 1}", "steps: null", "weights: {a: 1}", "limit: [1]"])
def test_values_of_another_kind_are_refused(write, text):
    name = text.split(":")[0]
    with pytest.raises(ValueError, match=rf"{name}=.* in the config file: the option takes (int|list|float)"):
        parse(write(text))


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("wieghts: [1]", [], r"Unknown key 'wieghts' in the config file\. Did you mean 'weights'\?"),
        ("zzz: 1", [], r"Unknown key 'zzz' in the config file\.$"),
        ("help: true", [], r"Unknown key 'help'"),
        ("config: other.yaml", [], r"Unknown key 'config'"),
        ("", ["--stepz", "3"], r"Unknown argument '--stepz'\. Did you mean 'steps'\?$"),
        # A flag is not shortened, and a key neither.
        ("", ["--shuf"], r"Unknown argument '--shuf'"),
        ("shuf: true", [], r"Unknown key 'shuf'"),
        ("a: 1\nb: 2", [], r"'a'.*'b'"),
    ],
)
def test_unknown_options_are_errors(write, text, flags, message):
    with pytest.raises(ValueError, match=message):
        parse([*write(text), *flags])


def test_unknown_options_are_returned_or_ignored_on_request(write):
    args = [*write("{zzz: 1, yyy: [2, 3]}"), "--xxx", "4"]
    options, remaining = TrlParser(Options).parse_args_and_config(args, return_remaining_strings=True)
    assert options == Options()
    assert remaining == ["--xxx", "4", "--zzz=1", "--yyy", "2", "3"]
    assert parse(args, fail_with_unknown_args=False) == Options()


def test_keys_for_another_program_are_left_alone(write):
    config = write("{zzz: 1, steps: 4}")
    assert parse(config, ignored_keys={"zzz"}) == Options(steps=4)


@pytest.mark.parametrize("text", ["- rate", "just text", "env: [A, B]"])
def test_a_file_that_is_no_mapping(write, text):
    with pytest.raises(ValueError, match=r"is not a mapping|Write one option a line"):
        parse(write(text))


def test_a_missing_file():
    with pytest.raises(FileNotFoundError, match=r"missing\.yaml"):
        parse(["--config", "missing.yaml"])


def test_a_field_named_config():
    @dataclass
    class Bad:
        config: str = "x"

    with pytest.raises(ValueError, match="Bad has a field `config`"):
        TrlParser(Bad)


def test_environment_of_the_file_lasts_as_long_as_the_run(write, monkeypatch):
    monkeypatch.setenv("TRL_TEST_OLD", "before")
    monkeypatch.delenv("TRL_TEST_NEW", raising=False)
    before = dict(os.environ)
    parser = TrlParser(Options)
    config = write("{steps: 4, env: {TRL_TEST_OLD: 'during', TRL_TEST_NEW: 1}}")
    with parser.environment:
        assert parser.parse_args_and_config(config) == (Options(steps=4),)
        assert os.environ == before | {"TRL_TEST_OLD": "during", "TRL_TEST_NEW": "1"}
    assert os.environ == before


ROWS = {"prompt": ["a", "b"], "answer": [1, 2]}


def save_dataset(path):
    Dataset.from_dict(ROWS).save_to_disk(path)


def save_splits(path):
    DatasetDict({"train": Dataset.from_dict(ROWS), "test": Dataset.from_dict(ROWS)}).save_to_disk(path)


def save_folder(path):
    path.mkdir()
    Dataset.from_dict(ROWS).to_json(path / "train.jsonl")
    Dataset.from_dict(ROWS).to_json(path / "test.jsonl")


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "save", "splits"),
    [
        ("saved", save_dataset, ["train"]),
        ("splits", save_splits, ["train", "test"]),
        ("folder", save_folder, ["train", "test"]),
        ("rows.jsonl", lambda path: Dataset.from_dict(ROWS).to_json(path), ["train"]),
        ("rows.json", lambda path: Dataset.from_dict(ROWS).to_json(path), ["train"]),
        ("rows.parquet", lambda path: Dataset.from_dict(ROWS).to_parquet(path), ["train"]),
        ("rows.csv", lambda path: Dataset.from_dict(ROWS).to_csv(path), ["train"]),
    ],
)
def test_datasets_on_disk(tmp_path, name, save, splits, streaming):
    save(tmp_path / name)
    dataset = get_dataset(ScriptArguments(dataset_name=str(tmp_path / name), dataset_streaming=streaming))
    assert list(dataset) == splits
    assert [dict(row) for row in dataset["train"]] == [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]
    assert hasattr(dataset["train"], "__len__") is not streaming


def test_a_file_is_the_training_split_whatever_its_name(tmp_path):
    Dataset.from_dict(ROWS).to_json(tmp_path / "rows.jsonl")
    script_args = ScriptArguments(dataset_name=str(tmp_path / "rows.jsonl"), dataset_train_split="mine")
    assert list(get_dataset(script_args)) == ["mine"]


def test_datasets_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="dataset_name is missing"):
        get_dataset(ScriptArguments())
    (tmp_path / "rows.txt").write_text("a")
    with pytest.raises(ValueError, match=r"rows\.txt' is a \.txt file.*\.json, \.jsonl, \.parquet, \.csv"):
        get_dataset(ScriptArguments(dataset_name=str(tmp_path / "rows.txt")))
