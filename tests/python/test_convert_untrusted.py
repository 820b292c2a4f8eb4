"""Damaged and malicious checkpoints: read, or rejected with ConversionError, in bounded memory."""

import argparse
import enum
import json
import math
import os
import pickle
import random
import re
import signal
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from test_convert import ROOT, megatron_layers, save_dcp, states
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from torchweft.convert import ConversionError, _atomic_write, compare, convert, inspect, verify
from torchweft.convert._coverage import coverage_error
from torchweft.convert._pickle_globals import DCP_GLOBALS, PLAIN_GLOBALS
from torchweft.convert._unpickler import load

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
HERE = Path(__file__).parent


def worker(*words: object) -> dict:
    """Returns the answers of convert_worker.py; fails if the process crashes."""
    run = [sys.executable, HERE / "convert_worker.py", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stderr[-3000:]}"
    return json.loads(done.stdout)


# ---- crafted pickles ------------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def integer(value: int) -> bytes:
    content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(content)]) + content


def tuple_of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def put(number: int) -> bytes:
    return b"r" + struct.pack("<I", number)


def get(number: int) -> bytes:
    return b"j" + struct.pack("<I", number)


STORAGE = tuple_of(text("storage"), b"ctorch\nFloatStorage\n", text("0"), text("cpu"), b"K\x04") + b"Q"


def tensor(shape: bytes, strides: bytes, first: bytes = b"K\x00", storage: bytes = STORAGE) -> bytes:
    given = tuple_of(storage, first, shape, strides, b"\x89", b"ccollections\nOrderedDict\n)R")
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + given + b"R"


GOOD = tensor(tuple_of(b"K\x04"), tuple_of(b"K\x01"))


def sized(*shape: int) -> bytes:
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    return tensor(tuple_of(*map(integer, shape)), tuple_of(*map(integer, strides)))


def dict_of(**items: bytes) -> bytes:
    return b"}(" + b"".join(text(name) + item for name, item in items.items()) + b"u"


def beside(value: bytes) -> bytes:
    """A model, and a value beside it."""
    return dict_of(model=dict_of(a=GOOD), args=value)


def doubled(start: bytes, before: bytes, after: bytes, times: int = 60) -> bytes:
    """Starts with `start` and repeatedly builds a new object from the last one, used twice."""
    found = start + put(0)
    for number in range(times):
        found += b"0" + before + get(number) * 2 + after + put(number + 1)
    return found


def pt(file: Path, content: bytes, data: bytes = bytes(16), compressed: bool = False) -> None:
    """Writes a file as torch.save does, from a pickle and one storage."""
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(file, "w", kind) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + content + b".")
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", data)


def many_classes(count: int) -> bytes:
    names = b"\x8c\x05numpy\x94\x8c\x01x\x94"
    return names + b"(" + b"h\x00h\x01\x93" * count + b"t"


ENCODE = b"c_codecs\nencode\n"
PICKLES = {
    "memo_of_2_to_the_31": (beside(b"Nr\xff\xff\xff\x7f"), "fine"),
    "tuples_doubled": (beside(doubled(b"K\x01", b"", b"\x86")), "repeat each other"),
    "tuples_doubled_in_the_model": (dict_of(a=GOOD, b=doubled(b"K\x01", b"", b"\x86")), "repeat each other"),
    "long_text_repeated": (beside(text("x" * 10_000) + put(0) + b"0(" + get(0) * 200_000 + b"t"), "repeat each other"),
    "path_doubled": (beside(doubled(text("x"), b"cpathlib\nPosixPath\n", b"\x86R")), "times its bytes"),
    "bytes_made_again_and_again": (
        beside(text("x" * 100_000) + put(0) + b"(" + (ENCODE + get(0) + text("latin1") + b"\x86R") * 9_999),
        "times its bytes",
    ),
    "text_of_4_GB": (beside(b"X\xff\xff\xff\xff"), "within an object"),
    "bytes_of_2_to_the_60": (beside(b"\x8e" + struct.pack("<Q", 1 << 60)), "within an object"),
    "integer_of_2_GB": (beside(b"\x8b\xff\xff\xff\x7f"), "an integer of"),
    "a_hundred_thousand_classes": (beside(many_classes(100_000)), "fine"),
    "two_million_sets": (beside(b"(" + b"\x8f" * 2_000_000 + b"t"), "times its bytes"),
    "list_in_itself": (beside(b"]" + put(0) + get(0) + b"a"), "contains itself"),
    "dict_in_itself": (b"}" + put(0) + text("model") + get(0) + b"s", "contains itself"),
    "lists_in_lists": (beside(b"]" * 100_000 + b"a" * 99_999), "contains itself"),
    "tuples_in_tuples": (beside(b")" + b"\x85" * 100_000), "contains itself"),
    "a_key_of_tuples_in_tuples": (beside(b"})" + b"\x85" * 100_000 + b"Ns"), "is a key"),
    "a_key_that_is_a_list": (beside(b"}]Ns"), "key"),
    "size_below_0": (dict_of(a=sized(-4)), "shape has -4"),
    "size_of_2_to_the_63": (dict_of(a=sized(1 << 63)), "shape has 9223372036854775808"),
    "product_of_2_to_the_64": (dict_of(a=sized(1 << 32, 1 << 32)), "larger than a tensor"),
    "size_that_is_a_bool": (dict_of(a=tensor(tuple_of(b"\x88"), tuple_of(b"K\x01"))), "shape has a bool"),
    "size_that_is_text": (dict_of(a=tensor(tuple_of(text("4")), tuple_of(b"K\x01"))), "shape has a str"),
    "shape_that_is_a_number": (dict_of(a=tensor(b"K\x04", tuple_of(b"K\x01"))), "shape is a int"),
    "a_hundred_dimensions": (dict_of(a=sized(*[1] * 100)), "100 dimensions"),
    "stride_below_0": (dict_of(a=tensor(tuple_of(b"K\x02"), tuple_of(integer(-1)))), "strides has -1"),
    "strides_that_are_missing": (dict_of(a=tensor(tuple_of(b"K\x02"), b")")), "0 strides"),
    "begin_below_0": (dict_of(a=tensor(tuple_of(b"K\x02"), tuple_of(b"K\x01"), integer(-8))), "offset .* has -8"),
    "larger_than_its_storage": (dict_of(a=sized(5)), "storage of 16 bytes"),
    "expanded_to_4_TB": (dict_of(a=tensor(tuple_of(integer(1 << 40)), tuple_of(b"K\x00"))), "expanded"),
    "many_empty_layers": (dict_of(**{"decoder.layers.a": sized(1 << 40, 0)}), "not plausible"),
    "storage_that_is_not_one": (dict_of(a=tensor(b")", b")", storage=tuple_of(b"K\x00", b"K\x04"))), "without data"),
    "storage_without_a_name": (dict_of(a=tensor(b")", b")", storage=doubled(b"K\x01", b"", b"\x86") + b"Q")), "data"),
    "tensor_of_a_call_of_itself": (
        dict_of(a=b"ctorch._tensor\n_rebuild_from_type_v2\n" + put(0) + tuple_of(get(0), b"N", b")", b"N") + b"R"),
        "unsupported class",
    ),
    "namespace_of_numbers": (beside(b"cargparse\nNamespace\n)\x81}K\x01K\x02sb"), "attributes of a Namespace"),
    "parameter_of_text": (dict_of(a=b"ctorch._utils\n_rebuild_parameter\n" + tuple_of(text("x")) + b"R"), "Parameter"),
    "raw_bytes_that_are_a_list": (dict_of(model=dict_of(a=GOOD), **{"weft.raw": b"]"}), "weft.raw"),
    "two_tensors_of_one_name": (b"}(K\x01" + GOOD + text("1") + GOOD + b"u", "called 1"),
    "nothing_on_the_stack": (b"0", "empty stack"),
    "opcode_of_protocol_0": (beside(b"I1\n"), "opcode b'I'"),
    "end_of_a_list_that_has_not_begun": (b"t", "was not started"),
}


# ---- crafted files --------------------------------------------------------------------------------------------------


def rows(**tensors: dict) -> dict:
    return {"__metadata__": {"format": "pt"}, **tensors}


def safetensors(file: Path, header: object, data: bytes = bytes(16)) -> None:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(content)) + content + data)


def row(shape: object, start: object = 0, stop: object = 16, dtype: object = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


OWN = "weft.checkpoint"
HEADERS = {
    "lists_in_lists": (b'{"a":' + b"[" * 100_000, "recursion|damaged"),
    "metadata_in_metadata": (rows(a=row([4])) | {"__metadata__": {OWN: "[" * 100_000}}, "damaged"),
    "size_below_0": (rows(a=row([-4])), "shape has -4"),
    "two_sizes_below_0": (rows(a=row([-2, -2])), "shape has -2"),
    "size_of_2_to_the_70": (rows(a=row([1 << 70])), "shape has 1180591620717411303424"),
    "size_that_is_a_bool": (rows(a=row([True, 4])), "shape has a bool"),
    "size_that_is_a_float": (rows(a=row([4.0])), "shape has a float"),
    "shape_that_is_text": (rows(a=row("4")), "shape is a str"),
    "shape_of_4_TB": (rows(a=row([1 << 40])), "has 16 bytes for F32"),
    "bytes_of_4_TB": (rows(a=row([1 << 40], 0, 1 << 42)), "truncated"),
    "offset_that_is_a_float": (rows(a=row([4], 0.0)), "data_offsets has a float"),
    "offset_below_0": (rows(a=row([4], -16, 0)), "data_offsets has -16"),
    "three_offsets": (rows(a={"dtype": "F32", "shape": [4], "data_offsets": [0, 8, 16]}), "3 numbers"),
    "row_that_is_a_list": (rows(a=[1]), "dtype"),
    "dtype_that_is_a_list": (rows(a=row([4], dtype=[])), "dtype"),
    "two_of_the_same_bytes": (rows(a=row([4]), b=row([2], 8)), "a and b in .* share bytes"),
    "a_name_twice": (b'{"a": %s, "a": %s}' % ((json.dumps(row([4])).encode(),) * 2), "twice"),
    "metadata_that_is_a_list": (rows(a=row([4])) | {"__metadata__": []}, "metadata is not a dict"),
    "values_that_are_a_list": (rows(a=row([4])) | {"__metadata__": {OWN: '{"common": [[1, 2]]}'}}, "damaged"),
    "values_that_are_damaged": (
        rows(a=row([4])) | {"__metadata__": {OWN: '{"common": {"args": {"()": "Namespace", "of": [1]}}}'}},
        "values beside the model are damaged",
    ),
    "scalar_in_a_place_of_layers": (rows(**{"decoder.layers.": row([4])}), "fine"),
    "number_of_a_layer_too_long": (rows(**{f"decoder.layers.{'9' * 5000}.a": row([4])}), "fine"),
    "tensors_without_an_element": (rows(**{"decoder.layers.a": row([1 << 40, 0], 0, 0)}), "not plausible"),
}


def dcp(folder: Path, found: object, size: int = 200) -> None:
    folder.mkdir()
    (folder / ".metadata").write_bytes(found if isinstance(found, bytes) else pickle.dumps(found))
    torch.save(torch.ones(4), folder / "a.distcp")
    with (folder / "a.distcp").open("ab") as file:
        file.truncate(max(size, (folder / "a.distcp").stat().st_size))


def described(shape, chunks, places=None, dtype=torch.float32) -> metadata.Metadata:
    """One tensor with adjacent chunks."""
    pieces = [metadata.ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in chunks]
    kind = metadata.TensorStorageMetadata(metadata.TensorProperties(dtype=dtype), shape, pieces)
    places = places or [("a.distcp", 0 if not i else 4096 * i, 1000) for i in range(len(chunks))]
    pairs = zip(chunks, places, strict=True)
    storage = {metadata.MetadataIndex("a", at): _StorageInfo(*place) for (at, _), place in pairs}
    return metadata.Metadata({"a": kind}, None, storage)


def changed(**fields: object) -> metadata.Metadata:
    found = described([4], [([0], [4])])
    for name, value in fields.items():
        setattr(found, name, value)
    return found


METADATA_FILES = {
    "hole": (described([8, 4], [([0, 0], [2, 4]), ([4, 0], [4, 4])]), r"a in .*: no chunk covers \[2:4, 0:4\] of"),
    "hole_behind": (described([8], [([0], [4])]), r"no chunk covers \[4:8\]"),
    "overlap": (described([8], [([0], [5]), ([4], [4])]), r"\[0:5\] and \[4:8\] overlap"),
    "overlap_as_large_as_a_hole": (described([8], [([0], [4]), ([2], [4])]), r"\[0:4\] and \[2:6\] overlap"),
    "outside": (described([8], [([0], [4]), ([6], [4])]), r"\[6:10\] is outside"),
    "no_chunk": (described([8], []), r"no chunk covers \[0:8\]"),
    "other_dimensions": (described([8], [([0, 0], [2, 4])]), "another number of dimensions"),
    "chunk_larger_than_its_byte_range": (
        described([1 << 40], [([0], [1 << 40])]),
        "4398046511104 bytes, but its byte range",
    ),
    "chunks_of_one_byte_range": (
        described([8], [([0], [4]), ([4], [4])], [("a.distcp", 0, 900), ("a.distcp", 0, 900)]),
        "share byte 0 of a.distcp",
    ),
    "place_behind_the_file": (described([4], [([0], [4])], [("a.distcp", 0, 1 << 50)]), "truncated"),
    "place_below_0": (described([4], [([0], [4])], [("a.distcp", -8, 100)]), "has -8"),
    "place_that_is_text": (described([4], [([0], [4])], [("a.distcp", "0", 100)]), "has a str"),
    "place_in_another_folder": (described([4], [([0], [4])], [("../a.distcp", 0, 100)]), "is not in"),
    "place_that_is_transformed": (described([4], [([0], [4])], [("a.distcp", 0, 100, ["zstd"])]), "transformations"),
    "shape_below_0": (described([-4], [([0], [4])]), "shape has -4"),
    "shape_of_text": (described("ab", [([0], [4])]), "shape is a str"),
    "shape_of_2_to_the_70": (described([1 << 70], [([0], [4])]), "shape has 118"),
    "no_names": (changed(state_dict_metadata=[1]), "not a dict"),
    "name_that_is_a_number": (changed(state_dict_metadata={1: 2}), "has no name"),
    "entry_that_is_a_number": (changed(state_dict_metadata={"a": 2}), "contains a int, expected a BytesStorage"),
    "no_places": (changed(storage_data=None), "in no file"),
    "places_that_are_a_list": (changed(storage_data=[1]), "storage_data is not a dict"),
    "places_of_numbers": (changed(storage_data={1: 2}), "contains a int, expected a MetadataIndex"),
    "no_metadata": ({"a": 1}, "contains a dict, expected a Metadata"),
    "an_empty_file": (b"", "damaged"),
}
few = metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
many = metadata.TensorStorageMetadata(metadata.TensorProperties(), torch.Size([4]), [few] * 5000)
METADATA_FILES["chunks_repeated"] = (changed(state_dict_metadata={f"a{i}": many for i in range(5000)}), "repeat")

ITERATIONS = dict.fromkeys((b"", b".", b"..", b"../x", b"\xb2", b"9" * 5000, b"\x00"), "names no iteration")
ITERATIONS |= {b"7": "does not exist", "²".encode(): "does not exist"}


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, str]:
    """The outcome of each crafted file, all read in one process limited to 256 MB above its imports."""
    folder = tmp_path_factory.mktemp("made")
    for name, (content, _) in PICKLES.items():
        pt(folder / f"pickle_{name}.pt", content)
    for name, (header, _) in HEADERS.items():
        safetensors(folder / f"header_{name}.safetensors", header)
    for name, (found, _) in METADATA_FILES.items():
        dcp(folder / f"metadata_{name}", found, 10_000)
    for number, content in enumerate(ITERATIONS):
        (folder / f"iteration_{number}").mkdir()
        (folder / f"iteration_{number}" / "latest_checkpointed_iteration.txt").write_bytes(content)
    make_large(folder)
    return worker("files", folder)


def make_large(folder: Path) -> None:
    """Small files that claim large sizes."""
    pt(folder / "large_deflated.pt", beside(text("x" * 300_000_000)), compressed=True)
    pt(folder / "large_layers.pt", dict_of(**{"decoder.layers." + "a" * 500: sized(500_000)}), bytes(2_000_000))
    pt(folder / "large_of_one_storage.pt", dict_of(**{f"a{i}": sized(250_000) for i in range(20)}), bytes(1_000_000))
    pt(folder / "large_record.pt", dict_of(a=sized(4)))
    content = (folder / "large_record.pt").read_bytes()
    at = content.rindex(b"PK\1\2")  # the last entry of the directory; its sizes are at 20 and 24
    (folder / "large_record.pt").write_bytes(content[: at + 20] + b"\xfe\xff\xff\xff" * 2 + content[at + 28 :])
    for length in (100 << 20, 1 << 63):
        (folder / f"large_header_{length}.safetensors").write_bytes(struct.pack("<Q", length) + b"{}")
    (folder / "large_index").mkdir()
    (folder / "large_index" / "model.safetensors.index.json").write_text('{"weight_map": ' + "[" * 100_000)


EXPECTED = {f"pickle_{name}.pt": answer for name, (_, answer) in PICKLES.items()}
EXPECTED |= {f"header_{name}.safetensors": answer for name, (_, answer) in HEADERS.items()}
EXPECTED |= {f"metadata_{name}": answer for name, (_, answer) in METADATA_FILES.items()}
EXPECTED |= {f"iteration_{number}": answer for number, answer in enumerate(ITERATIONS.values())}
EXPECTED |= {
    "large_deflated.pt": "compressed",
    "large_layers.pt": "not plausible",
    "large_of_one_storage.pt": "share storages",
    "large_record.pt": "truncated",
    f"large_header_{100 << 20}.safetensors": "truncated",
    f"large_header_{1 << 63}.safetensors": "truncated",
    "large_index": "damaged",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_crafted_file_error_names_its_fault(answers, name):
    assert re.search(EXPECTED[name], answers[name]), answers[name]
    assert answers[name] == "fine" or answers[name].startswith("ConversionError: ") and name in answers[name]


def test_every_element_must_be_covered_once():
    """Compares with a count of every element, for random slices."""
    draw, kinds = random.Random(3), set()
    for _ in range(3000):
        shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
        slices = []
        for cut in [[draw.randint(0, size) for size in shape]] * draw.randint(1, 2):
            for corner in range(2 ** len(shape)):
                edges = enumerate(zip(cut, shape, strict=True))
                if draw.random() < 0.95:
                    slices.append(tuple((0, at) if corner >> d & 1 else (at, size) for d, (at, size) in edges))
        seen = torch.zeros(shape)
        for bounds in slices:
            seen[tuple(slice(start, stop) for start, stop in bounds)] += 1
        reason = coverage_error(shape, slices)
        kind = "overlap" if (seen > 1).any() else "no chunk" if (seen == 0).any() else None
        kinds.add(kind)
        assert (reason is None) == (kind is None) and (kind is None or kind in reason), (shape, slices, reason)
        if kind == "no chunk":
            inside = eval(f"seen{reason.split('covers ')[1].split(' of its')[0]}", {"seen": seen})
            assert inside.numel() and not inside.any()
    assert kinds == {"overlap", "no chunk", None}
    assert "outside" in coverage_error([4], [((2, 6),)])


# ---- what a pickle can reach ----------------------------------------------------------------------------------------

SHARED = [(module, name) for table in (PLAIN_GLOBALS, DCP_GLOBALS) for module, name in table]


@pytest.mark.parametrize("opcodes", [b"}%ssb", b"N}%ss\x86b", b"}%s\x8ds", b"(%su", b"%ss", b"%sa"])
def test_pickle_cannot_change_globals(opcodes):
    """Tries to set a state and items on each global and on each object shared between pickles."""
    before = {
        key: repr(vars(value)) if hasattr(value, "__dict__") else repr(value) for key, value in DCP_GLOBALS.items()
    }
    change = opcodes.replace(b"%s", text("evil") + b"K\x01")
    for module, name in dict.fromkeys(SHARED):
        whole = f"c{module}\n{name}\n".encode()
        for named in (whole, whole + b"K\x00\x85R", whole + text("cpu") + b"\x85R", whole + b")R"):
            content = b"\x80\x02" + named + change + b"."
            try:
                load(content, "a pickle", DCP_GLOBALS)
            except ConversionError:
                continue
    assert before == {key: repr(vars(v)) if hasattr(v, "__dict__") else repr(v) for key, v in DCP_GLOBALS.items()}
    for kind in (argparse.Namespace, metadata.Metadata, metadata._MEM_FORMAT_ENCODING, torch.Size):
        assert not hasattr(kind, "evil")
    assert not any(hasattr(member, "evil") for member in metadata._MEM_FORMAT_ENCODING)


def test_pickle_makes_only_plain_data():
    """Enum members and classes become names, whatever the pickle does with them."""
    found = load(pickle.dumps(described([4], [([0], [4])])), "a pickle", DCP_GLOBALS)
    seen, path = set(), [found]
    while path:
        item = path.pop()
        seen.add(type(item).__name__)
        assert not isinstance(item, (type, enum.Enum)) and not callable(item)
        path += item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()
        path += [item.args, item.state] if type(item).__name__ == "DcpObject" else []
    assert seen <= {"DcpObject", "dict", "list", "tuple", "str", "int", "bool", "NoneType", "dtype"}


# ---- fuzzing --------------------------------------------------------------------------------------------------------


def seeds(folder: Path) -> Path:
    """A valid checkpoint of each format."""
    args = argparse.Namespace(num_attention_heads=4, num_query_groups=2, dtype=torch.bfloat16, path=Path("a/b"))
    marked = torch.nn.Parameter(torch.randn(3))
    marked.partition_dim = 0
    beside = {"iteration": 7, "args": args, "sizes": (1, {2}), "state": b"xy", "seed": torch.ones(2)}
    save_dcp(folder / "torch_dist", megatron_layers(1) | states(1), beside)
    model = {"marked": marked, "view": torch.randn(4, 6).t(), "deep": {"er": torch.ones(2)}, "step": 3}
    torch.save({"model": model, **beside}, folder / "plain.pt")
    convert(folder / "torch_dist", folder / "plain.safetensors", to="safetensors")
    (folder / "plain.safetensors.conversion.json").unlink()
    return folder


@pytest.mark.parametrize(
    "count, seed", [(100, 1), pytest.param(7000, 2, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_mutated_files_are_read_or_rejected(tmp_path, count, seed):
    """Mutates bits, lengths, opcodes and sections of valid files of each format; 20,000 mutations in the slow size."""
    found = worker("fuzz", seeds(tmp_path), count, seed)
    print(found)
    assert found.keys() == {"plain.pt", "plain.safetensors", "torch_dist"}
    for name, answers in found.items():
        assert answers.keys() == {"fine", "rejected"}, (name, answers)
        assert answers["rejected"] > count / 4 and answers["fine"] > count / 50, (name, answers)


# ---- reports and targets --------------------------------------------------------------------------------------------


def test_report_is_never_written_through_link(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    (tmp_path / "precious").write_text("kept")
    for suffix in (".conversion.json", ".conversion.json.partial", ".partial"):
        (tmp_path / f"b.safetensors{suffix}").symlink_to(tmp_path / "precious")
    convert(tmp_path / "a.pt", tmp_path / "b.safetensors", to="safetensors")
    assert (tmp_path / "precious").read_text() == "kept"
    assert not (tmp_path / "b.safetensors.conversion.json").is_symlink() and verify(tmp_path / "b.safetensors") == []
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "precious").write_text("kept")
    (tmp_path / "d.partial").symlink_to(tmp_path / "c")
    convert(tmp_path / "a.pt", tmp_path / "d", to="safetensors")
    assert (tmp_path / "c" / "precious").read_text() == "kept" and not (tmp_path / "d").is_symlink()


def test_report_is_written_after_target(tmp_path, monkeypatch):
    """A conversion that fails at the rename leaves the old target without the report of the new one."""
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({"a": torch.zeros(2)}, tmp_path / "b.pt")
    target = tmp_path / "c.safetensors"
    convert(tmp_path / "a.pt", target, to="safetensors")

    def fails(*_: object) -> None:
        raise OSError("no rename today")

    with monkeypatch.context() as patch:
        patch.setattr(_atomic_write, "replace_target", fails)
        with pytest.raises(ConversionError, match="could not be written"):
            convert(tmp_path / "b.pt", target, to="safetensors", overwrite=True)
    assert compare(target, tmp_path / "a.pt") == (1, [])
    assert not (tmp_path / "c.safetensors.conversion.json").exists() or verify(target) == []
    (tmp_path / "c.safetensors.conversion.json").unlink(missing_ok=True)
    (tmp_path / "c.safetensors.conversion.json").mkdir()  # the report cannot be written: nothing changes
    with pytest.raises(ConversionError, match="could not be written"):
        convert(tmp_path / "b.pt", target, to="safetensors", overwrite=True)
    assert compare(target, tmp_path / "a.pt") == (1, [])


def test_folder_is_replaced_without_rename_exchange(tmp_path, monkeypatch):
    """Uses two renames. Between them the old target has another name, which the error and the next run know."""
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({"a": torch.zeros(2)}, tmp_path / "b.pt")
    convert(tmp_path / "a.pt", tmp_path / "c", to="safetensors")
    monkeypatch.setattr(_atomic_write.ctypes, "CDLL", lambda _: argparse.Namespace(renameat2=lambda *_: -1))
    convert(tmp_path / "b.pt", tmp_path / "c", to="safetensors", overwrite=True)
    assert compare(tmp_path / "b.pt", tmp_path / "c") == (1, []) and verify(tmp_path / "c") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.pt", "c"]
    (tmp_path / "c").rename(tmp_path / "c.replaced")
    with pytest.raises(ConversionError, match=r"does not exist; .*interrupted left .*c\.replaced"):
        inspect(tmp_path / "c")


def test_empty_iteration_file_is_rejected(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("")
    with pytest.raises(ConversionError, match="names no iteration"):
        inspect(tmp_path)


CONVERTER = """
import os, sys
from torchweft.convert import convert

one, other, folder = sys.argv[1:]
convert(one, folder + "/warm", to="safetensors")
for line in sys.stdin:
    to, name = line.split()
    child = os.fork()
    if child == 0:
        while True:
            for source in (one, other):
                convert(source, f"{folder}/{name}", to=to, overwrite=True)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


@pytest.mark.parametrize("kills", [8, pytest.param(52, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_target_is_complete_whenever_conversion_is_killed(tmp_path, kills):
    """SIGKILL at random moments of conversions that repeatedly replace a target."""
    sources = [tmp_path / "one.pt", tmp_path / "other.pt"]
    for number, source in enumerate(sources):
        tensors = {f"layers.{i}.mlp.fc2.weight": torch.full((500, 500), float(i + 9 * number)) for i in range(8)}
        torch.save(tensors, source)
    folder = tmp_path / "targets"
    folder.mkdir()
    kinds = [("safetensors", "a"), ("safetensors", "b.safetensors"), ("torch_dist", "c"), ("pt", "d.pt")]
    for to, name in kinds:
        convert(sources[0], folder / name, to=to)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-c", CONVERTER, *map(str, (*sources, folder))]
    draw, seen = random.Random(5), set()
    with subprocess.Popen(run, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as converter:
        for number in range(kills):
            to, name = kinds[number % len(kinds)]
            print(to, name, file=converter.stdin, flush=True)
            child = int(converter.stdout.readline())
            time.sleep(draw.uniform(0, 0.5))
            os.kill(child, signal.SIGKILL)
            assert converter.stdout.readline() == "ended\n"
            seen |= {path.suffix for path in folder.glob("*.partial")}
            equal = [compare(source, folder / name)[1] == [] for source in sources]
            assert sorted(equal) == [False, True], (number, name, equal)
            if (folder / name).is_dir() or (folder / f"{name}.conversion.json").exists():
                assert verify(folder / name) == [], (number, name)
        converter.stdin.close()
    assert seen, "no conversion was killed while it wrote"
    for to, name in kinds:  # the next conversion removes the leftovers
        convert(sources[1], folder / name, to=to, overwrite=True)
    assert not list(folder.glob("*.partial")) and not list(folder.glob("*.replaced"))
