"""A MONAI bundle read sealed: what is made, with the same bits as by MONAI's own parser, and what is refused by key."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fairflare.base.disk.bundle_files import BundleError
from fairflare.cli import commands as cli
from fairflare.cli.data.doctor import sealing
from fairflare.data.datalist import DataError
from fairflare.federation.plan.plan import make_plan
from fairflare.flare.export.recipes import FairRecipe
from fairflare.provision import job_classes
from fairflare.tasks.bundle import MonaiBundleTask, seal_settings
from fairflare.tasks.bundles.bundle_config import Bundle
from fairflare.tasks.bundles.bundle_parts import BundleParts
from fairflare.tasks.bundles.expressions import Refused
from fairflare.tasks.bundles.sealed import Sealed, allowed_classes, shipped_classes
from tests.bundles import train_config, write_bundle, write_volumes

pytestmark = pytest.mark.usefixtures("one_thread")
HERE: dict[str, Any] = {
    "n": 3, "names": ["a", "b"], "deep": {"list": [1, [2, 3]]}, "roi": [4, 5], "flag": True, "dims": 3, "rank": 0,
    "net_def": {"_target_": "UNet", "spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": [4, 8],
                "strides": [2]},
    "net": "$@net_def.to(torch.device('cpu'))",
}  # fmt: skip


def by_monai(config: dict[str, Any], key: str) -> Any:
    from monai.bundle import ConfigParser

    return ConfigParser(copy.deepcopy(config)).get_parsed_content(key)


@pytest.mark.parametrize(
    "text",
    [
        "@n", "@deep#list#1#0", "@deep::list::0", "$@n + 1", "$len(@names) + 1", "$[1,] * @n",
        "$@names + ['c']", "$np.pi / 12", "$-@n * 2", "$torch.float32", "$np.uint8", "$(np.float32, np.int32)",
        "$monai.utils.InterpolateMode.BICUBIC", "$monai.utils.enums.GridSampleMode.NEAREST", "$@rank > 0",
        "$1 if @flag else 2", "$not @flag",
        "$@names[0]", "$@deep['list'][1]", "$(1, *@roi)",
        "$torch.tensor([1.0, 2.0])", "$list(@roi)", "$max(@roi)", "$'x' + 'y'",
        "$tuple(@roi)", "$@n == 3", "$@n // 2 % 2", "$np.array([1, 2]).astype(np.float32)",
    ],
)  # fmt: skip
def test_an_expression_has_the_value_that_python_gives(text: str) -> None:
    config = {**HERE, "x": text}
    found, expected = Sealed(config).make("x"), by_monai(config, "x")
    assert type(found) is type(expected)
    if isinstance(found, torch.Tensor | np.ndarray):
        assert (found == expected).all()
        assert found.dtype == expected.dtype
    else:
        assert found == expected


@pytest.mark.parametrize(
    "text",
    [
        "$lambda x: x > 0", "$lambda x: 0", "$lambda x: x.reshape((1, *@roi))", "$lambda x: np.where(x > 3, x, 0)",
        "$lambda x: x[0].sum(0)", "$lambda x: (x == @n) | (x == 2)", "$lambda x: x.astype(np.uint8)",
        "$lambda x: x / x.max()",
    ],
)  # fmt: skip
def test_a_function_of_an_array(text: str) -> None:
    config = {**HERE, "x": text}
    array = np.arange(20.0).reshape(4, 5)
    found, expected = Sealed(config).make("x")(array), by_monai(config, "x")(array)
    np.testing.assert_array_equal(found, expected)


REFUSED = [
    ("$__import__('os').system('x')", "calls \\(?.__import__|calls|'__import__' is not on the list"),
    ("$open('/etc/passwd')", "'open' is not on the list"),
    ("$().__class__.__bases__", "shape \\(Attribute\\)"),
    ("$torch.load('x')", "'torch.load' is not on the list"),
    ("$torch.hub.load('a', 'b')", "not on the list"),
    ("$np.load('x', allow_pickle=True)", "'np.load' is not on the list"),
    ("$monai.bundle.download('x')", "not on the list"),
    ("$getattr(torch, 'load')", "shape \\(Name\\)"),
    ("$getattr(@net, 'load')", "'getattr' is not on the list"),
    ("$torch.os.system", "shape \\(Attribute\\)"),
    ("$eval('1')", "eval"),
    ("$f'{@n:1000000000}'", "JoinedStr"),
    ("$'%1000000000d' % 1", "operator Mod"),
    ("$'{0.__class__}'.format(1)", "calls"),
    ("$[1] * 1000000000000000", "more numbers than"),
    ("$10**10**10", "operator Pow"),
    ("$9223372036854775807 + 1", "above 2"),
    ("$'x' * 100000000", "more numbers than"),
    ("$[[0] * 9999 for i in range(9999)]", "ListComp"),
    ("$[0] * 9999 * 9999", "more numbers than"),
    ("$range(9)", "'range' is not on the list"),
    ("$max(@roi, key=lambda v: v)", "gives 'max' texts, objects"),
    ("$3 * [0]", "operator Mult on int and list"),
    ("$@n in (3, 4)", "operator In on int and tuple"),
    ("$@names[0] == 'a'", "operator Eq on str and str"),
    ("$torch.tensor([1]).dtype", "shape \\(Attribute\\)"),
    ("$np.array(['/etc/passwd'])", "gives 'np.array' texts"),
    ("$np.array('', dtype='U200000000')", "gives 'np.array' texts"),
    ("$np.array([@net])", "gives 'np.array' texts, objects"),
    ("$np.array([1], dtype=[('a', np.float64, (9999, 9999))])", "gives texts|kinds"),
    ("$np.array(1.0, dtype=(np.float64, (10000, 10000)))", "kinds"),
    ("$np.array([[0] * 9000])[[0] * 9000]", "takes other than one entry"),
    ("$@roi[::-1]", "Slice"),
    ("$@net.float()", "calls what it may not"),
    ("$@net.training.T", "shape \\(Attribute\\)"),
    ("$np.array([1]).tofile('x')", "calls"),
    ("$np.array([1]).dump(1)", "calls"),
    ("$[@net][0].dtype", "shape \\(Attribute\\)"),
    ("$@n.T", "shape \\(Attribute\\)"),
    ("$@net.__dict__", "shape \\(Attribute\\)"),
    ("$@net.apply(print)", "shape|calls"),
    ("$@net.load_state_dict([])", "calls"),
    ("$(lambda: 1)()", "calls|Lambda"),
    ("$lambda x, y=1: x", "Lambda"),
    ("$lambda x: x.__class__.__mro__[1]", "has 'x.__class__.__mro__', 'x.__class__' in a function, which is not known"),
    ("$lambda x: x.tofile('a')", "has 'x.tofile' in a function"),
    ("$lambda x: np.load('a')", "has 'np.load' in a function"),
    ("$lambda x: x.claamp(0, 1)", "has 'x.claamp' in a function"),
    ("$lambda x: [i for i in x]", "has '\\[i for i in x\\]', "),
    ("$lambda x: x**9", "has 'Pow' in a function"),
    ("$len([lambda x: compile('1', 'f', 'eval')])", "'compile' in a function"),
    ("$[x for x in @roi for y in @roi]", "ListComp"),
    ("$(x := 1)", "NamedExpr"),
    ("$1 << 99", "operator LShift"),
    ("$import os", "no expression"),
    ("$False and 5", "shape \\(BoolOp\\)"),
    ("${'a': @n}", "shape \\(Dict\\)"),
    ("$monai.inferers.SimpleInferer()", "'monai.inferers.SimpleInferer' is not on the list of functions"),
    ("$" + "(" * 240 + ")" * 240, "no expression"),
    ("$" + "1+" * 300 + "1", "longer than 500 characters"),
    ("$np.array([None])", "an array whose entries are no numbers"),
    ("$b'x'", "Constant"),
    ("$os.sep", "Attribute"),
    ("@x", "refers to itself"),
    ("@nowhere", "'x' leads to 'nowhere', where nothing is .*; correct the name, or write the value itself"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_an_expression_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(Refused, match=message) as refused:
        Sealed({**HERE, "x": text}).make("x")
    assert "'x'" in str(refused.value)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"_target_": "os.system", "command": "x"}, "not on the list"),
        ({"_target_": "UNett"}, "'UNett' is not on .*docs/bundles.md"),
        ({"_target_": "builtins.eval"}, "not on the list"),
        ({"_target_": "monai.transforms.io.dictionary.LoadImaged.__init__"}, "not on the list"),
        ({"_target_": "monai.transforms.DataStatsd", "keys": "image"}, "not on the list"),
        ({"_target_": "transforms.Compose"}, "not on the list"),
        ({"_target_": ["Compose"]}, "not on the list"),
        ({"_target_": "LoadImaged", "keys": "image", "reader": "os.system"}, "'reader' of a LoadImaged may load"),
        ({"_target_": "LoadImaged", "keys": "image", "allow_pickle": True}, "'allow_pickle' of a LoadImaged is no arg"),
        ({"_target_": "LoadImaged", "keys": "image", "kwargs": {"a": 1}}, "'kwargs' of a LoadImaged is no arg"),
        ({"_target_": "LoadImaged", "keys": "image", "mmap_mode": "w+"}, "'mmap_mode' of a LoadImaged is no arg"),
        ({"_target_": "Spacingd", "keys": "image", "pixdim": [1e-5, 1e-5, 1e-5]}, "too large for an image"),
        ({"_target_": "GridSplitd", "keys": "image", "grid": [9999, 99999]}, "too large for an image"),
        ({"_target_": "EfficientNetBN", "model_name": "efficientnet-b0"}, "'pretrained' of a EfficientNetBN"),
        ({"_target_": "DenseNet121", "spatial_dims": 2, "in_channels": 1, "out_channels": 2, "pretrained": 1}, "may"),
        ({"_target_": "HoVerNet", "pretrained_url": "https://x"}, "'pretrained_url' of a HoVerNet may load"),
        ({"_target_": "TorchVisiond", "keys": "image", "name": "Lambda"}, "'name' of a TorchVisiond may load"),
        ({"_target_": "LoadImaged", "keys": "../image"}, "may be a path"),
        ({"_target_": "LoadImaged", "keys": "os.path"}, "may be a path or the name of a module"),
        ({"_target_": "Spacingd", "keys": "image", "pixdim": ["1e-05", 1, 1]}, "or is a number as text"),
        ({"_target_": "UNet", "_mode_": "debug"}, "'_mode_' of a UNet is no argument"),
        ({"_target_": "UNet", "_requires_": ["$1"]}, "'_requires_' of a UNet is no argument"),
        ({"_target_": "Flipd", "keys": "image", "_disabled_": False}, "'_disabled_' of a Flipd is no argument"),
        ({**HERE["net_def"], "out_channels": 10**9}, "too large"),
        ({"_target_": "BorderPadd", "keys": "image", "spatial_border": 10**6}, "too large for an image"),
        ({"_target_": "AsDiscreted", "keys": "pred", "to_onehot": 10**7}, "'to_onehot' of .*got 10000000"),
        ({"_target_": "Resized", "keys": "image", "spatial_size": [2**14, 2**14, 2**14]}, "too large for an image"),
        ({**HERE["net_def"], "channels": [9999, 9999]}, "too large to be made"),
        ({"_target_": "DenseNet", "spatial_dims": 2, "in_channels": 1, "out_channels": 2, "block_config": [999]}, "t"),
    ],
)  # fmt: skip
def test_an_object_that_is_refused(target: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        Sealed({"x": target}).make("x")


def test_lists_within_lists_do_not_explode() -> None:
    bomb = {f"a{i}": [f"@a{i + 1}", f"@a{i + 1}"] for i in range(40)} | {"a40": 1}
    with pytest.raises(Refused, match="more than"):
        Sealed({**bomb, "x": {"_target_": "Compose", "transforms": "@a0"}}).make("x")
    doubled = {f"a{i}": f"$@a{i + 1} + @a{i + 1}" for i in range(40)} | {"a40": [1]}
    with pytest.raises(Refused, match="more numbers than"):
        Sealed(doubled).make("a0")
    chain = {f"a{i}": f"@a{i + 1}" for i in range(200)} | {"a200": 1}
    with pytest.raises(Refused, match="over more than 60 keys"):
        Sealed(chain).make("a0")


def test_macros_of_macros_and_other_files(tmp_path: Path) -> None:
    def read(**more: Any) -> Bundle:
        return Bundle(write_bundle(tmp_path / "b", {**train_config(), **more}), sealed=shipped_classes())

    assert read(a="%b", b=["%n"], n=3).make("a") == [3]
    assert read(a="%b", b={"x": "%c::y"}, c={"y": ["@n"]}, n=3).make("a::x::0") == 3
    for circle in ({"a": "%a"}, {"a": "%b", "b": "%a"}, {"a": "%b::x", "b": {"x": "%a"}}):
        with pytest.raises(BundleError, match=r"key 'a' .*'a' refers to itself"):
            read(**circle).make("a")
    with pytest.raises(BundleError, match=r"key 'a' .*: '/etc/x.json'.*correct"):
        read(a="%/etc/x.json#a").make("a")
    with pytest.raises(BundleError, match=r"key 'a' .*lacking: 'nowhere'"):
        read(a="%nowhere").make("a")
    with pytest.raises(BundleError, match="more than 20000 values"):
        read(m=[[0] * 200] * 100).make("m")
    with pytest.raises(BundleError, match=r"'m0' cannot be made.*20000"):
        read(**{f"m{i}": [f"%m{i + 1}"] * 10 for i in range(9)}, m9=1).make("m0")
    for macro in ("%inferer", "%/etc/passwd"):  # of a part that a bundle may lack, so that it could be overlooked
        with pytest.raises(BundleError, match="'validate#evaluator#inferer' cannot be"):
            BundleParts(read(validate={"evaluator": {"inferer": macro}}, inferer="%inferer")).make("validate_inferer")
    copies = read(a=["%net_def", "%net_def", "@net_def"], **HERE).make("a")
    assert len({*map(id, copies)}) == 3  # each macro is an object of its own
    (tmp_path / "b" / "configs" / "train.json").write_text(" " * 2**21)
    with pytest.raises(BundleError, match="longer than 262144 characters"):
        Bundle(tmp_path / "b")


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_brackets_within_brackets_are_refused_before_a_reader_meets_them(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monai.bundle.ConfigParser.load_config_file", lambda file: pytest.fail("was read"))
    monkeypatch.setattr("yaml.safe_load", lambda text: pytest.fail("was read"))
    deep = f'{{"net_def": {"[" * 150}{{"a": {"[" * 50}1{"]" * 50}}}{"]" * 150}}}'
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / f"train{suffix}").write_text(deep)
    for text in (None, deep):
        with pytest.raises(BundleError, match="180 brackets within each other"):
            Bundle(tmp_path, text=text)


def test_a_function_that_gives_a_path_to_load_is_refused(tmp_path: Path) -> None:
    for text in ("$lambda x: 'other'", "$lambda x: x + 'y'", "$lambda x: [x]"):
        made = Sealed({"x": {"_target_": "Lambdad", "keys": "image", "func": text}}).make("x")
        with pytest.raises(Refused, match="which is no array"):
            made({"image": "a"})


def test_a_call_of_a_function_has_a_budget() -> None:
    wide = f"$lambda x: {' + '.join(['x.reshape((-1, 1))'] * 20)} + x.reshape((1, -1))"
    function = Sealed({"x": wide}).make("x")
    assert function(np.zeros(99)).shape == (99, 99)
    with pytest.raises(Refused, match="more numbers than"):
        function(np.zeros(9999))


# ------------------------------------------------------------------------------------------------ the site's list


def test_a_site_narrows_and_extends_the_list(tmp_path: Path) -> None:
    assert allowed_classes() == shipped_classes()
    narrowed = allowed_classes(["default", "-monai.losses.DiceCELoss"])
    assert shipped_classes() - narrowed == {"monai.losses.DiceCELoss"}
    assert allowed_classes(["monai.networks.nets.UNet"]) == {"monai.networks.nets.UNet"}
    assert Sealed({"x": {"_target_": "fractions.Fraction", "numerator": 3}}, {"fractions.Fraction"}).make("x") == 3
    task = MonaiBundleTask(**seal_settings(write_bundle(tmp_path / "b"), ["train"]))
    own = write_volumes(tmp_path / "site")
    task.open_site("site-1", own)
    with pytest.raises(DataError, match=r"site-1': .*key 'loss'.*'DiceCELoss' is not"):
        task.open_site("site-1", {**own, "bundle_classes": ["default", "-monai.losses.DiceCELoss"]})
    with pytest.raises(DataError, match=r"'site-1': bundle_classes.* got 'all'"):
        task.open_site("site-1", {**own, "bundle_classes": "all"})
    task.heed({"bundle_classes": ["monai.networks.nets.VNet"]})
    with pytest.raises(BundleError, match="UNet' is not on the list"):
        task.build_model()
    assert "fairflare.tasks.bundle.MonaiBundleTask" in job_classes()


# ------------------------------------------------------------------------------------------------ in a job


def test_a_job_without_custom_code_carries_the_configuration(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b")
    FairRecipe("fed_avg", monai_bundle=folder, sites=2, packaging="preinstalled").export(str(tmp_path / "jobs"))
    app = tmp_path / "jobs" / "fed_avg" / "app"
    assert not (app / "custom").exists()
    text = (app / "config" / "config_fed_client.json").read_text()
    assert str(tmp_path) not in text
    told = json.loads(text)["executors"][0]["executor"]["args"]["task"]
    assert told["path"] == "fairflare.tasks.bundle.MonaiBundleTask"
    task = MonaiBundleTask(**told["args"])
    assert task.primary_metric == "dice"
    with pytest.raises(ValueError, match="is not the one of this job"):
        MonaiBundleTask(**{**told["args"], "bundle_text": told["args"]["bundle_text"].replace("0.01", "0.02")})
    config = train_config()
    config["network_def"] = {"_target_": "scripts.net.Net"}
    (folder / "scripts").mkdir()
    (folder / "scripts" / "net.py").write_text("raise SystemError")
    write_bundle(folder, config)
    with pytest.raises(BundleError, match=r"key 'network_def' .*'scripts.net.Net' is"):
        FairRecipe("fed_avg", monai_bundle=folder, sites=2, packaging="preinstalled")
    assert Bundle(folder).own_code() == ["network_def#_target_"]


def test_a_job_without_code_is_written_without_running_the_bundles(tmp_path: Path) -> None:
    """Give a published bundle's network an argument that writes a file: it is refused by key, unrun."""
    config, marker = train_config(), tmp_path / "written"
    config["network_def"]["in_channels"] = f"$int(open('{marker}', 'w').write('x'))"
    folder = write_bundle(tmp_path / "b", config)
    command = ["export", "fed_avg", "--monai-bundle", str(folder), "--out", str(tmp_path / "jobs"), "--sites", "2"]
    refused = CliRunner().invoke(cli.app, [*command, "--preinstalled"])
    assert refused.exit_code == 2
    assert "'network_def::in_channels'" in refused.output
    assert not marker.exists()
    assert CliRunner().invoke(cli.app, command).exit_code == 0  # a job with the bundle's code may run it
    assert marker.exists()


def test_the_doctor_looks_at_the_optimizer_too_and_says_what_to_write_in_full(tmp_path: Path) -> None:
    config = train_config()
    config["optimizer"] |= {"_target_": "torch.optim.Adamm", "lr": "0.01"}
    config["loss"]["squared_pred"] = "$@flg" + " + 0" * 20
    folder = write_bundle(tmp_path / "b", config)
    said = [finding.text for finding in sealing(folder, {}) if finding.what == "not sealed"]
    assert len(said) == 2
    assert "'loss::squared_pred' leads to 'flg', where nothing is" in said[0]
    assert said[0].endswith("write the value itself")
    assert "'torch.optim.Adamm' is not on the list" in said[1]
    assert "such as 'torch.optim.Adam', or let" in said[1]
    assert said[1].endswith("let the site's owner add it to bundle_classes")
    assert len([finding for finding in sealing(folder, {"optimizer": "sgd"}) if finding.what == "not sealed"]) == 1


def test_the_doctor_has_exit_code_1_where_a_bundle_cannot_train_with_its_code_either(tmp_path: Path) -> None:
    """Check a bundle without a network, and that one whose own class alone is not on the list only gets warnings."""
    config = train_config()
    del config["network"], config["network_def"]
    nothing = CliRunner().invoke(cli.app, ["doctor", "--monai-bundle", str(write_bundle(tmp_path / "nothing", config))])
    assert nothing.exit_code == 1, nothing.output
    assert "no key for network: looked for" in " ".join(nothing.output.split())
    config = train_config()
    config["loss"] = {"_target_": "scripts.losses.Own"}
    own = list(sealing(write_bundle(tmp_path / "own", config), {}))
    assert {one.state for one in own} == {"warning", "ok"}
    assert CliRunner().invoke(cli.app, ["doctor", "--monai-bundle", str(tmp_path / "own")]).exit_code == 3
    sealed = str(write_bundle(tmp_path / "sealed"))
    assert CliRunner().invoke(cli.app, ["doctor", "--monai-bundle", sealed]).exit_code == 0


def parts_of(folder: Path, sealed: bool) -> BundleParts:
    return BundleParts(Bundle(folder, sealed=shipped_classes() if sealed else None))


def test_all_parts_have_the_bits_of_monais_parser(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b")
    image, label = torch.rand(1, 1, 16, 16, 16), (torch.rand(1, 1, 16, 16, 16) > 0.5).float()
    losses = []
    for sealed in (True, False):
        parts = parts_of(folder, sealed)
        parts.check()
        torch.manual_seed(5)
        network = parts.make("network")
        optimizer = parts.optimizer(list(network.parameters()))
        own = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = parts.kept("loss")(network(image), label)
            loss.backward()
            optimizer.step()
            own.append(loss.item())
        losses.append(own)
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3


EVENTS = ("exec", "open", "import", "socket", "subprocess", "os.system", "ctypes", "pickle.find_class")


@contextmanager
def heard(allowed: tuple[str, ...]) -> Iterator[list[str]]:
    """What happens in the context that a sealed bundle must not do; the hook cannot be taken out, so it is switched."""
    found: list[str] = []
    on = [True]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if not on[0] or not event.startswith((*EVENTS, "compile")):
            return
        if event == "open":
            if not str(args[0]).startswith(allowed) and not isinstance(args[0], int):
                found.append(f"open {args[0]}")
        elif event == "compile":  # ast.parse comes by here too, and makes a tree and no code
            frame: Any = sys._getframe(1)
            if frame.f_code.co_name != "parse" and str(args[1]).startswith(("<unknown>", "<string>")) and args[0]:
                found.append(f"compile {args[0]!r:.60}")
        elif event == "exec":
            if args[0].co_filename == "<unknown>":
                found.append(f"exec {args[0]}")
        elif event == "import":
            if not args[0].partition(".")[0].isidentifier() or args[0].startswith(("scripts", "evil")):
                found.append(f"import {args[0]}")
        else:
            found.append(event)

    sys.addaudithook(hook)
    try:
        yield found
    finally:
        on[0] = False


def test_nothing_runs_while_a_sealed_bundle_is_read_and_trained(tmp_path: Path) -> None:
    """First once without the hook, so that what libraries load at their first use is loaded."""
    config = train_config()
    config["imports"] += ["$import evil", "$__import__('evil')"]
    config["initialize"] += ["$open('/nowhere/evil', 'w')"]
    folder = write_bundle(tmp_path / "b", config)
    own = write_volumes(tmp_path / "site")
    plan = make_plan("fed_avg", monai_bundle=folder, sites=2, settings=seal_settings(folder, ["train"]))

    def train() -> float:
        task = MonaiBundleTask(bundle_text=plan.task.bundle_text)
        data = task.open_site("site-1", own)
        torch.manual_seed(0)
        network = task.build_model()
        optimizer = task.make_optimizer(list(network.parameters()))
        for inputs, targets in data.batches("training", batch_size=2, shuffle_seed=1, augment=True):
            task.loss(network(inputs), targets).backward()
            optimizer.step()
        return task.evaluate(network, data.batches("test", batch_size=1), torch.device("cpu"))["loss"]

    first = train()
    places = (
        str(tmp_path),
        sys.prefix,
        sys.base_prefix,
        str(Path(__file__).parents[2] / "custom"),
        "/dev/null",
        "/proc",
    )
    with heard(places) as found:
        assert train() == first
    assert found == []


def test_the_hook_hears_what_monais_parser_does(tmp_path: Path) -> None:
    """Else the test above would prove nothing."""
    folder = write_bundle(tmp_path / "b", {**train_config(), "evil": "$open('/etc/hostname').close()"})
    with heard((str(tmp_path), sys.prefix, sys.base_prefix)) as found:
        Bundle(folder).make("evil")
    assert any(one.startswith("open /etc/hostname") for one in found)
    assert any(one.startswith("compile") for one in found)


# ------------------------------------------------------------------------------------------------ metrics


def with_metric(tmp_path: Path, metric: dict[str, Any]) -> Any:
    config = train_config()
    picks = {"output_transform": "$monai.handlers.from_engine(['pred', 'label'])"}
    config["validate"]["key_metric"] = {"m": {**metric, **picks}}
    return parts_of(write_bundle(tmp_path / "b", config), sealed=True).kept("key_metric")


Batch = list[dict[str, torch.Tensor]]


def test_accuracy_is_the_mean_over_images(tmp_path: Path) -> None:
    metric = with_metric(tmp_path, {"_target_": "ignite.metrics.Accuracy"})
    rng = np.random.default_rng(0)
    found, truth = (rng.random((4, 2, 5)) < share for share in (0.4, 0.7))
    items = [
        {"pred": torch.tensor(p).float(), "label": torch.tensor(y).float()} for p, y in zip(found, truth, strict=True)
    ]
    scores = np.stack([metric.measure_image(item, "label") for item in items])
    assert metric.name == "accuracy"
    assert scores.mean() == pytest.approx(float((found == truth).mean()), rel=1e-6)
    assert metric.declare()[0].higher_is_better is True
    with pytest.raises(BundleError, match=r"\(1, 2, 5\) and label \(1, 5\) differ"):
        metric.measure_image({"pred": items[0]["pred"], "label": items[0]["label"][0]}, "label")


@pytest.mark.parametrize(
    ("target", "name", "expected", "higher"),
    [
        ({"_target_": "ConfusionMatrix", "metric_name": "f1 score"}, "f1_score",
         lambda p, y: 2 * (p * y).sum() / (p.sum() + y.sum()), True),
        ({"_target_": "ConfusionMatrixMetric", "metric_name": ["miss rate"]}, "miss_rate",
         lambda p, y: ((1 - p) * y).sum() / y.sum(), False),
        ({"_target_": "MeanAbsoluteError"}, "mean_absolute_error", lambda p, y: np.abs(p - y).sum() / (4 * 2), False),
        ({"_target_": "MeanSquaredError"}, "mean_squared_error", lambda p, y: ((p - y) ** 2).sum() / (4 * 2), False),
    ],
)  # fmt: skip
def test_a_metric_of_sums(
    tmp_path: Path, target: dict[str, Any], name: str, expected: Callable[..., Any], higher: bool
) -> None:
    """Measure images of which one alone would give another mean; a quotient of sums has no score of an image."""
    metric = with_metric(tmp_path, target)
    rng = np.random.default_rng(0)
    found, truth = (rng.random((4, 2, 5)) < share for share in (0.4, 0.7))
    truth[0, :, 1:] = False
    times = 3.0 if "error" in name else 1.0
    items = [
        {"pred": torch.tensor(p).float() * times, "label": torch.tensor(y).float()}
        for p, y in zip(found, truth, strict=True)
    ]
    scores = np.ma.masked_invalid(np.stack([metric.measure_image(item, "label") for item in items]))
    pair = [np.stack([item[key].numpy() for item in items]).astype(float) for key in ("pred", "label")]
    assert metric.name == name
    assert metric.summed is ("error" not in name)
    assert metric.value(scores) == pytest.approx(float(expected(*pair)), rel=1e-6)
    declared = metric.declare()
    assert [m.name for m in declared] == [name, "loss"]
    assert declared[0].higher_is_better is higher
    assert declared[0].holds(5.0) is ("error" in name)


def test_a_metric_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"is 'ROCAUC', .*MeanSquaredError; name"):
        with_metric(tmp_path, {"_target_": "ROCAUC"})


def test_an_argument_of_the_metric_that_is_no_number(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"'include_background', .*true, false or"):
        with_metric(tmp_path, {"_target_": "MeanDice", "include_background": ["$lambda x: x"]})
    with pytest.raises(BundleError, match=r"'num_classes', .*a whole number up to 512"):
        with_metric(tmp_path, {"_target_": "MeanDice", "num_classes": 10**9})


def test_a_text_of_a_job_that_is_none() -> None:
    for text in ("a: " + "b" * 2**20, "- 1", "{", "!!python/object/apply:os.system [x]"):
        with pytest.raises(ValueError, match="the text of the job cannot be made"):
            MonaiBundleTask(bundle_text=text)


def test_a_number_too_long_to_be_printed_is_refused_by_key(tmp_path: Path) -> None:
    text = seal_settings(write_bundle(tmp_path / "b"), ["train"])["bundle_text"]
    task = MonaiBundleTask(bundle_text=text.replace("$@network.parameters()", f"0x{'f' * 9000}"))
    with pytest.raises(BundleError, match="key 'optimizer' must be of all"):
        task.training_settings()


def test_a_detectors_metric_says_that_detection_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"'IgniteCocoMetric', .*detection is not"):
        with_metric(tmp_path, {"_target_": "scripts.evaluator.IgniteCocoMetric"})
