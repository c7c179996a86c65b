"""Test tensors in folders by number: the two newest, read one at a time, never half-written."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from fairflare.exchange.tensor_folder import KeptTensors


def kept_in(folder: Path | None) -> KeptTensors:
    return KeptTensors("", "the tensors of {} are", folder)


def test_tensors_come_back(tmp_path):
    folders = kept_in(tmp_path / "a" / "b")
    keep = folders.begin(3)
    base = torch.arange(12.0).reshape(3, 4)
    given = {
        "conv.weight": base,
        "b/c d%2E..": base.t(),
        ".hidden": torch.tensor([float("nan"), -0.0]),
        "empty": torch.zeros(0, 2),
        "half": base[1:, 1].half(),
        "Gewicht-ä": torch.nn.Parameter(base * 2),
    }
    for name, tensor in given.items():
        keep(name, tensor)
    found = kept_in(tmp_path / "a" / "b").load(3)
    assert list(found) == sorted(given)
    assert len(found) == len(given)
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert repr(found[name].tolist()) == repr(tensor.tolist())
    assert "conv" not in found
    assert 3 not in found
    assert "" not in found
    with pytest.raises(KeyError, match="conv"):
        found["conv"]
    found["conv.weight"].zero_()  # a copy: what is kept does not change
    assert found["conv.weight"][2, 3] == 11
    assert [path.parent.name for path in tmp_path.rglob("*.*") if path.is_file()] == ["000003"] * len(given)


def test_the_two_newest_numbers_are_kept(tmp_path):
    folders = kept_in(tmp_path)
    for number in range(1, 6):
        folders.begin(number)("w", torch.tensor([number]))
        assert sorted(p.name for p in tmp_path.iterdir()) == [f"{n:06d}" for n in range(max(1, number - 1), number + 1)]
        for kept in range(max(1, number - 1), number + 1):
            assert folders.load(kept)["w"].tolist() == [kept]
    with pytest.raises(RuntimeError, match=r"tensors of 3 are not in .*; start a new"):
        folders.load(3)


def test_a_number_begun_again_is_empty(tmp_path):
    """Check that files and partial files of an interrupted attempt are not mixed with the next one."""
    folders = kept_in(tmp_path)
    folders.begin(1)("w", torch.zeros(1))
    keep = folders.begin(2)
    keep("w", torch.ones(1))
    keep("of another model", torch.ones(1))
    (tmp_path / "000002" / ".v.safetensors.99999999.partial").write_bytes(b"left by a killed process")
    assert list(folders.load(2)) == ["of another model", "w"]
    folders.begin(2)("w", torch.full((1,), 2.0))
    assert {name: t.item() for name, t in folders.load(2).items()} == {"w": 2.0}
    assert folders.load(1)["w"].item() == 0
    assert [path.name for path in (tmp_path / "000002").iterdir()] == ["w.safetensors"]
    folders.begin(1)  # a run that starts anew in the same folder
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000001"]


def test_a_temporary_folder_goes_with_its_object():
    folders = kept_in(None)
    folders.begin(1)("w", torch.ones(1))
    root = folders.root
    assert folders.load(1)["w"].item() == 1
    assert root.is_dir()
    del folders
    assert not root.exists()


def test_nothing_is_made_before_something_is_written(tmp_path):
    folders = kept_in(tmp_path / "new")
    with pytest.raises(RuntimeError):
        folders.load(0)
    assert not (tmp_path / "new").exists()


def test_a_full_disk_leaves_the_old_tensor_and_no_rest(tmp_path, monkeypatch):
    keep = kept_in(tmp_path).begin(1)
    keep("w", torch.zeros(3))

    def half_written(tensors: object, file: Path, metadata: object) -> None:
        Path(file).write_bytes(b"half")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", half_written)
        with pytest.raises(OSError, match="No space left"):
            keep("w", torch.ones(3))
    assert [path.name for path in (tmp_path / "000001").iterdir()] == ["w.safetensors"]
    assert kept_in(tmp_path).load(1)["w"].tolist() == [0, 0, 0]
    (tmp_path / "000001" / "w.safetensors").unlink()
    (tmp_path / "000001").rmdir()
    with pytest.raises(OSError, match=r"tensor 'w' cannot be written to .*000001"):
        keep("w", torch.ones(3))


@pytest.mark.parametrize("damage", ["cut", "header", "foreign"])
def test_a_damaged_file_is_named(tmp_path, damage):
    folders = kept_in(tmp_path)
    folders.begin(1)("w", torch.ones(100))
    file = tmp_path / "000001" / "w.safetensors"
    content = file.read_bytes()
    if damage == "foreign":
        safetensors.torch.save_file({"other": torch.ones(1)}, file)
    else:
        file.write_bytes(content[:-4] if damage == "cut" else b"\xff" * 20 + content[20:])
    with pytest.raises(ValueError, match=r"tensor 'w' in .*safetensors is damaged"):
        folders.load(1)["w"]


@pytest.mark.parametrize("name", ["", "x" * 300, None])
def test_unusable_names(tmp_path, name):
    with pytest.raises(ValueError, match=r"must be a non-empty|'x.*longer than"):
        kept_in(tmp_path).begin(1)(name, torch.ones(1))
