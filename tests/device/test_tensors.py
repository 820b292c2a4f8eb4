"""Storages, aliases, views, saving and loading, and what raises."""

import copy
import gc
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchweft import _device

GPU = torch.device("cuda", 1)


def test_an_alias_keeps_the_memory():
    host = _device.host_alias(torch.full((1000,), 7.0, device=GPU))
    gc.collect()
    torch.zeros(1000, device=GPU)
    assert host.is_cpu and (host == 7).all()


def test_an_alias_is_the_memory():
    x = torch.zeros(4, 4, device=GPU)
    host = _device.host_alias(x.t()[1:])
    host.fill_(1)
    assert x.sum().item() == 12 and host.data_ptr() == x[0, 1:].data_ptr() and host.stride() == (1, 4)


def test_views_share_memory_and_gradients():
    def write(x):
        x[1].mul_(2)
        x.t()[0].zero_()
        x.diagonal().add_(1)
        x.unfold(0, 2, 1)[0, 0].fill_(9)
        x[:, ::2].transpose(0, 1).sub_(x[0, :2, None])
        return x

    found = write(torch.arange(12.0, device=GPU).view(3, 4))
    assert torch.equal(found.cpu(), write(torch.arange(12.0).view(3, 4)))
    assert found.as_strided((2,), (5,)).data_ptr() == found.data_ptr() and found[1]._is_view()
    base = torch.ones(4, device=GPU, requires_grad=True)
    y = base * 1
    y[:2] *= 3
    y.sum().backward()
    assert base.grad.tolist() == [3, 3, 1, 1]


def test_out_and_resize():
    a = torch.ones(5, device=GPU)
    out = torch.empty(0, device=GPU)
    torch.add(a, 1, out=out)
    assert out.tolist() == [2] * 5 and out.device == GPU
    torch.cat([a, a], out=out.resize_(0))
    assert out.shape == (10,)
    values, indices = torch.empty(0, device=GPU), torch.empty(0, device=GPU, dtype=torch.long)
    torch.sort(torch.tensor([3.0, 1.0], device=GPU), out=(values, indices))
    assert values.tolist() == [1, 3] and indices.tolist() == [1, 0]
    x = torch.arange(4.0, device=GPU)
    view = x[1:]
    x.resize_(100)
    assert x[:4].tolist() == [0, 1, 2, 3] and x.shape == (100,)
    view.add_(1)
    assert x[1] == 2, "a view sees the memory of its base after resize_"
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        torch.add(a, 1, out=torch.empty(2, device=GPU))


def test_set():
    a, b = torch.zeros(2, device=GPU), torch.arange(6.0, device=GPU)
    a.set_(b)
    assert a.data_ptr() == b.data_ptr() and a.shape == (6,)
    a.set_(b.untyped_storage(), 1, (2, 2), (2, 1))
    assert a.tolist() == [[1, 2], [3, 4]]
    a.set_()
    assert a.numel() == 0 and a.device == GPU
    a.data = torch.ones(3, device=GPU)
    assert a.shape == (3,)
    with pytest.raises(RuntimeError, match="set the storage of a tensor on device"):
        a.set_(torch.ones(2).untyped_storage())
    a.resize_as_(b).swap_dims if False else a.resize_as_(b)
    assert a.shape == b.shape


def test_untyped_storage():
    storage = torch.UntypedStorage(16, device=GPU)
    assert storage.device == GPU and storage.nbytes() == 16 and storage.is_cuda
    t = torch.empty(0, device=GPU).set_(storage).fill_(1)
    assert t.shape == (4,)
    storage.resize_(0)
    assert storage.nbytes() == 0 and t.data_ptr() == 0
    storage.resize_(16)
    assert t.fill_(3).sum() == 12
    assert (
        storage.clone().device == GPU and storage.cpu().device.type == "cpu" and storage.cpu().cuda(2).device.index == 2
    )
    storage.fill_(0)
    storage[0] = 1
    assert storage.tolist()[:2] == [1, 0] and storage[0] == 1
    storage.copy_(torch.ones(4).untyped_storage())
    assert t.tolist() == [1] * 4
    assert torch.UntypedStorage([1, 2, 3], device=GPU).tolist() == [1, 2, 3]
    assert torch.cuda.FloatStorage(4).device.type == "cuda"


@pytest.mark.parametrize("zipped", [True, False])
def test_save_and_load(zipped):
    def load(file, **options):
        file.seek(0)
        return torch.load(file, **options)

    model = nn.Linear(3, 3).to(GPU)
    file = io.BytesIO()
    torch.save(model.state_dict(), file, _use_new_zipfile_serialization=zipped)
    assert load(file)["weight"].device == GPU and torch.equal(load(file)["weight"], model.weight)
    for place in ("cpu", "cuda:3", {"cuda:1": "cuda:5"}, lambda storage, location: storage.cuda(4)):
        found = load(file, map_location=place)["weight"]
        assert str(found.device) == ("cuda:5" if isinstance(place, dict) else "cuda:4" if callable(place) else place)
        assert torch.equal(found.cpu(), model.weight.cpu())
    whole = io.BytesIO()
    torch.save(model, whole)
    assert load(whole, weights_only=False).weight.device == GPU
    missing = io.BytesIO()
    torch.save(torch.ones(2, device="cuda:7"), missing)
    assert load(missing, map_location="cuda:0").device.index == 0


def test_load_from_a_mapped_file(tmp_path):
    torch.save({"a": torch.arange(3.0, device=GPU)}, tmp_path / "a.pt")
    for place in (None, "cpu", "cuda:2"):
        found = torch.load(tmp_path / "a.pt", mmap=True, map_location=place)["a"]
        assert found.tolist() == [0, 1, 2] and str(found.device) == (place or "cuda:1")


def test_a_file_of_the_cpu_loads_on_a_device(tmp_path):
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "a.pt")
    model = nn.Linear(2, 2).to(GPU)
    model.load_state_dict(torch.load(tmp_path / "a.pt", map_location=GPU))
    model.load_state_dict(torch.load(tmp_path / "a.pt"))
    assert model.weight.device == GPU


def test_deepcopy_and_pickle():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(GPU)
    for found in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert found[0].weight.device == GPU and torch.equal(found[0].weight, model[0].weight)
    x = torch.ones(4, device=GPU)
    pair = copy.deepcopy([x, x[1:]])
    pair[0].fill_(5)
    assert pair[1].tolist() == [5] * 3 and x.sum() == 4


def test_conjugates():
    a = torch.randn(3, 3, dtype=torch.cfloat)
    assert torch.equal((a.to(GPU).conj() @ a.to(GPU).mH).cpu(), a.conj() @ a.mH)
    c = a.to(GPU).conj()
    assert c.is_conj() and c.imag.is_neg() and torch.equal(c.imag.neg().cpu(), a.imag)
    assert torch.equal(c.resolve_conj().cpu(), a.conj().resolve_conj())


def test_recurrent_cells():
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        model, x = kind(4, 5, 2, bidirectional=True), torch.randn(3, 2, 4)
        expected, _ = model(x)
        expected.square().sum().backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        found, _ = model.to(GPU)(x.to(GPU))
        found.square().sum().backward()
        torch.testing.assert_close(found.cpu(), expected)
        torch.testing.assert_close([p.grad.cpu() for p in model.parameters()], gradients)
    for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        cell, x = kind(4, 5), torch.randn(3, 4)
        expected = cell(x)
        found = cell.to(GPU)(x.to(GPU))
        pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
        for a, b in pairs:
            torch.testing.assert_close(a.cpu(), b)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 2, 4, device=GPU), torch.tensor([3, 2]))
    assert nn.LSTM(4, 5).to(GPU)(packed)[0].data.device == GPU


SPARSE = {
    "to_sparse": lambda: torch.eye(3, device=GPU).to_sparse(),
    "to_sparse_csr": lambda: torch.eye(3, device=GPU).to_sparse_csr(),
    "cuda": lambda: torch.eye(3).to_sparse().to(GPU),
    "sparse_coo_tensor": lambda: torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2), device=GPU),
    "embedding": lambda: nn.Embedding(4, 4, sparse=True).to(GPU)(torch.tensor([1], device=GPU)).sum().backward(),
}


@pytest.mark.parametrize("use", SPARSE.values(), ids=SPARSE)
def test_sparse_tensors_raise_by_name(use):
    with pytest.raises(NotImplementedError, match="[Ss]parse"):
        use()


@pytest.mark.parametrize(
    "use",
    [
        lambda x: torch.histogram(x, 3),
        lambda x: torch.histogramdd(x.view(-1, 1), [3]),
        lambda x: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*[x.view(1, 1, 2, 2)] * 3),
        lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, x, 32, x),
        lambda x: torch.ops.aten.mkldnn_linear_backward_input([4], x, x) if False else x.to_mkldnn(),
    ],
    ids=["histogram", "histogramdd", "flash_for_cpu", "int4", "to_mkldnn"],
)
def test_operations_of_the_cpu_alone_could_not_run(use):
    with pytest.raises((NotImplementedError, RuntimeError), match="Could not run|expected|only"):
        use(torch.ones(4, device=GPU))


def test_numpy_needs_a_copy():
    with pytest.raises(TypeError, match="can't convert cuda:1 device type tensor to numpy"):
        torch.ones(1, device=GPU).numpy()
    assert torch.ones(1, device=GPU).cpu().numpy().tolist() == [1]


def test_transforms_of_functions():
    x = torch.randn(3, device=GPU)
    assert torch.equal(torch.func.vmap(lambda a: a * 2)(x), x * 2)
    assert torch.equal(torch.func.jacrev(lambda a: a**2)(x).diagonal(), 2 * x)
    assert torch.equal(torch.func.jvp(lambda a: a**2, (x,), (x,))[1], 2 * x * x)


def test_scripted_and_traced():
    @torch.jit.script
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y + x

    x = torch.ones(2, device=GPU)
    for _ in range(4):
        assert f(x, x).tolist() == [2, 2]
    layer = nn.Linear(2, 2).to(GPU)
    assert torch.equal(torch.jit.trace(layer, x)(x), layer(x))


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.ones(3, device=GPU)
        assert (x @ x).device == GPU
        with pytest.raises(RuntimeError, match="same device"):
            F.linear(x, torch.ones(2, 3))


def test_many_operations_equal_the_cpu():
    x, w = torch.randn(3, 4), torch.randn(1, 1, 2, 2)
    image = torch.randn(1, 1, 4, 4)
    log_probabilities = torch.randn(5, 1, 4).log_softmax(2)
    square = x @ x.t() + 4 * torch.eye(3)
    programs = {
        "indexing": lambda t: (t(x)[t(x) > 0], t(x)[[0, 1]], t(x)[t(torch.tensor([1]))], t(x).unique()),
        "einsum": lambda t: torch.einsum("ij,kj->ik", t(x), t(x)),
        "linalg": lambda t: (torch.linalg.inv(t(square)), torch.linalg.cholesky(t(square)), t(square).det()),
        "fft": lambda t: torch.fft.irfft(torch.fft.rfft(t(x))),
        "conv": lambda t: (F.conv2d(t(image), t(w)), F.conv_transpose2d(t(image), t(w)), F.max_pool2d(t(image), 2)),
        "interpolate": lambda t: F.interpolate(t(image), scale_factor=2, mode="bilinear"),
        "ctc": lambda t: F.ctc_loss(t(log_probabilities), torch.tensor([[1, 2]]), (5,), (2,)),
        "norms": lambda t: (
            F.layer_norm(t(x), (4,)),
            F.group_norm(t(x), 2),
            F.batch_norm(t(x), None, None, training=True),
        ),
        "scatter": lambda t: t(x).scatter_add(0, t(torch.zeros(1, 4, dtype=torch.long)), t(torch.ones(1, 4))),
        "topk": lambda t: (*t(x).topk(2), *t(x).sort(0), t(x).argmax(), t(x).median(), t(x).quantile(0.3)),
        "loss": lambda t: F.cross_entropy(t(x), t(torch.tensor([0, 1, 2])), label_smoothing=0.1),
    }
    for name, program in programs.items():
        expected, found = program(lambda a: a), program(lambda a: a.to(GPU))
        for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (expected, found)), strict=True):
            assert b.device == GPU and torch.equal(a, b.cpu()), name
