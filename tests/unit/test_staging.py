"""Test staged models: bit for bit the same, read one tensor at a time, and never half-written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fairflare.exchange import staging as module
from fairflare.exchange.staging import Staging

ALL_DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
]


@pytest.fixture
def staging(tmp_path: Path) -> Staging:
    return Staging(tmp_path / "new" / "staging")


def assert_same(staged: object, state: dict[str, torch.Tensor]) -> None:
    assert list(staged) == list(state)  # type: ignore[call-overload]
    for name, tensor in state.items():
        got = staged[name]  # type: ignore[index]
        assert got.dtype == tensor.dtype
        assert got.shape == tensor.shape
        assert torch.equal(got, tensor.cpu())


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_and_shape(staging, dtype):
    values = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0)) * 5
    state = {
        "z": values.to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.empty(0, 3, dtype=dtype),
        "a.b": values[0].to(dtype),
    }
    staging.put("A", state)
    assert_same(staging.open("A"), state)


def test_shared_and_strided_tensors(staging):
    base = torch.arange(12.0).reshape(3, 4)
    linear = torch.nn.Linear(2, 2)
    state = {
        "base": base,
        "tied": base,
        "transposed": base.t(),
        "rows": base[1:],
        "columns": base[:, 1:3],
        "broadcast": torch.ones(1, 2).expand(3, 2),
        "parameter": linear.weight,
    }
    before = {name: tensor.detach().clone() for name, tensor in state.items()}
    staging.put("A", state)
    assert_same(staging.open("A"), before)
    assert state["tied"] is base


@pytest.mark.parametrize(
    "site", ["site-1", "Klinik Süd/3", "..", ".hidden", "a b", "100%", "x.safetensors", "c:\\d", "*", "\n", "医院"]
)
def test_any_site_name(staging, site):
    staging.put(site, {"w": torch.ones(1)})
    assert staging.sites() == [site]
    assert [path.parent for path in staging.folder.rglob("*")] == [staging.folder]
    assert staging.open(site)["w"].item() == 1
    assert Staging(staging.folder).sites() == [site]  # another process finds it
    staging.discard(site)
    assert list(staging.folder.iterdir()) == []


@pytest.mark.parametrize("site", ["", "x" * 300, None, 3])
def test_unusable_site_names(staging, site):
    with pytest.raises(ValueError, match=r"non-empty string|longer than"):
        staging.put(site, {"w": torch.ones(1)})
    assert list(staging.folder.iterdir()) == []


def test_sites_are_sorted_and_can_be_removed(staging):
    for site in ("c", "a", "b"):
        staging.put(site, {"w": torch.ones(1)})
    assert staging.sites() == ["a", "b", "c"]
    staging.discard("b")
    staging.discard("never staged")
    assert list(staging.open_all()) == ["a", "c"]
    (staging.folder / ".d.safetensors.99999999.partial").write_bytes(b"left by a killed process")
    assert staging.sites() == ["a", "c"]
    staging.clear()
    assert staging.sites() == []
    assert list(staging.folder.iterdir()) == []


def test_opening_what_is_not_there(staging):
    staging.put("A", {"w": torch.ones(1)})
    with pytest.raises(ValueError, match=r"site 'B' is not staged; .*'A'"):
        staging.open("B")
    with pytest.raises(KeyError, match="x"):
        staging.open("A")["x"]


def test_a_second_put_replaces_the_first(staging):
    staging.put("A", {"w": torch.zeros(3)})
    old = staging.open("A")
    staging.put("A", {"v": torch.ones(4)})
    assert_same(staging.open("A"), {"v": torch.ones(4)})
    with pytest.raises(ValueError, match="site 'A' was replaced while"):
        old["w"]


def test_a_failed_put_leaves_the_old_state_and_no_rest(staging, monkeypatch):
    staging.put("A", {"w": torch.zeros(3)})

    def half_written(path: Path, *_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_tensors", half_written)
    with pytest.raises(OSError, match=r"model of site 'A' cannot .*No space left"):
        staging.put("A", {"w": torch.ones(3)})
    assert [path.name for path in staging.folder.iterdir()] == ["A.safetensors"]
    assert staging.open("A")["w"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"w": [1.0]}, TypeError, "site 'A': 'w' must be a tensor, got list"),
        ({"w": torch.ones(2).to_sparse()}, TypeError, "'A': tensor 'w' must be dense"),
        ({"w": torch.ones(2) + 0j}, ValueError, "'A': tensor 'w' .*complex64"),
    ],
)
def test_what_cannot_be_staged(staging, state, error, message):
    with pytest.raises(error, match=message):
        staging.put("A", state)
    assert staging.sites() == []


@pytest.mark.parametrize("damage", ["cut", "header", "swapped", "foreign", "more"])
def test_a_damaged_file_is_named(staging, damage):
    staging.put("A", {"w": torch.ones(100)})
    file = staging.folder / "A.safetensors"
    content = file.read_bytes()
    if damage == "cut":
        file.write_bytes(content[:-4])
    elif damage == "header":
        file.write_bytes(b"\xff" * 20 + content[20:])
    elif damage == "swapped":
        staging.put("B", {"w": torch.ones(100)})
        os.replace(staging.folder / "B.safetensors", file)  # noqa: PTH105
    elif damage == "more":
        two = {"w": torch.ones(1), "x": torch.ones(1)}
        save_file(two, file, metadata={"site": "A", "names": '["w"]'})
    else:
        save_file({"w": torch.ones(1)}, file)
    with pytest.raises(ValueError, match=r"staged model of site 'A' .*is damaged"):
        staging.open("A")


def test_a_file_cut_while_it_is_read(staging, monkeypatch):
    """Check a cut between the look at the size and the end of reading: no other numbers appear."""
    monkeypatch.setattr(module, "_stamp", lambda descriptor: (0, 0, 0))
    staging.put("A", {"w": torch.ones(100)})
    staged = staging.open("A")
    file = staging.folder / "A.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"staged model of site 'A' .* ends early"):
        staged["w"]


def test_a_tensor_is_read_only_when_it_is_asked_for(staging, monkeypatch):
    staging.put("A", {f"t{index}": torch.full((1000,), float(index)) for index in range(5)})
    staged = staging.open("A")
    made: list[int] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **kw: made.append(size) or empty(size, **kw))
    assert "t1" in staged
    assert "x" not in staged
    assert len(staged) == 5
    assert staged.keys() == dict.fromkeys(f"t{index}" for index in range(5)).keys()
    assert made == []
    first = staged["t3"]
    assert made == [4000]
    first.zero_()  # a copy: the staged model does not change
    assert staged["t3"][0].item() == 3


def test_in_memory_while_it_fits(tmp_path):
    staging = Staging(tmp_path, memory=1000)
    state = {"w": torch.arange(100.0), "n": torch.tensor(3)}
    assert [staging.put(site, state) for site in "ab"] == [408, 408]
    state["w"].zero_()  # what is kept is a copy
    assert staging.put("c", state) > 408
    assert [path.name for path in tmp_path.iterdir()] == ["c.safetensors"]
    assert staging.sites() == ["a", "b", "c"]
    for site, last in (("a", 99), ("b", 99), ("c", 0)):
        assert (staging.open(site)["w"][-1], list(staging.open(site))) == (last, ["w", "n"])
    staging.put("a", {"w": torch.ones(300)})  # too large now
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "c.safetensors"]
    staging.put("c", {"w": torch.ones(5)})
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    with pytest.raises(TypeError):
        staging.open("c")["w"] = torch.zeros(5)  # type: ignore[index]
    staging.write_all(tmp_path / "all")
    assert Staging(tmp_path / "all").sites() == ["a", "b", "c"]
    assert [Staging(tmp_path / "all").open(site)["w"].numel() for site in "abc"] == [300, 100, 5]
    staging.discard("b")
    assert staging.sites() == ["a", "c"]
    staging.clear()
    assert staging.sites() == []


def test_a_failed_put_leaves_what_was_in_memory(tmp_path, monkeypatch):
    staging = Staging(tmp_path, memory=100)
    staging.put("A", {"w": torch.zeros(3)})
    monkeypatch.setattr(module, "write_tensors", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        staging.put("A", {"w": torch.ones(300)})
    assert staging.open("A")["w"].tolist() == [0, 0, 0]
    assert list(tmp_path.iterdir()) == []


def test_a_quarter_of_what_is_free(tmp_path, monkeypatch):
    free = [4 * 800]
    monkeypatch.setattr(module, "free_memory", lambda: free[0])
    staging = Staging(tmp_path, memory=None)
    staging.put("a", {"w": torch.ones(100)})
    free[0] = 0  # looked at once a round
    staging.put("b", {"w": torch.ones(100)})
    assert not list(tmp_path.iterdir())
    staging.clear()
    staging.put("a", {"w": torch.ones(100)})
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize(
    ("limit", "expected"), [("5000", 2000), ("max", None), (None, None), ("1000", 0), ("9" * 18, None)]
)
def test_free_memory_of_a_container(limit, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GROUP", tmp_path)
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text("3000\n")
    found = module.free_memory()
    assert found > 2**24 if expected is None else found == expected
