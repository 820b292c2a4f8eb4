"""Several devices: where a tensor is, what `torch.cuda` says of it, streams, events and random numbers."""

import copy
import threading
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.nn.functional as F
from torch import nn

LAST = torch.cuda.device_count() - 1
PLACES = [torch.device("cuda", index) for index in range(LAST + 1)]


def test_eight_devices():
    assert torch.cuda.is_available() and torch.cuda.device_count() == 8
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.accelerator.device_count() == 8


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_outputs_are_on_the_device_of_the_inputs(place):
    x = torch.randn(3, 4, device=place, requires_grad=True)
    w = torch.randn(4, 4, device=place)
    results = [
        x + 1,
        x @ w,
        x.sum(),
        x.nonzero(),
        x.to(torch.float64),
        x.new_empty(2),
        torch.rand_like(x),
        x.t(),
        x[0],
        x.sort().values,
        x > 0,
        torch.cat([x, x]),
        torch._foreach_mul([w], 2)[0],
        x.clone(),
        x.contiguous(),
        F.dropout(x),
        nn.Linear(4, 2, device=place)(x),
        torch.linalg.qr(w).Q,
        torch.var_mean(x, 0)[1],
    ]
    assert {t.device for t in results} == {place}
    F.gelu(x @ w).sum().backward()
    assert x.grad.device == place and x.get_device() == place.index


def test_the_current_device_is_where_cuda_is():
    with torch.cuda.device(3):
        assert torch.cuda.current_device() == 3 and torch.ones(1, device="cuda").device.index == 3
        with torch.cuda.device(5):
            assert torch.ones(1).cuda().device.index == 5
        assert torch.cuda.current_device() == 3
    assert torch.cuda.current_device() == 0
    torch.cuda.set_device("cuda:2")
    assert torch.zeros(1).to("cuda").device.index == 2
    x = torch.ones(1, device="cuda:4")
    assert (x + 1).device.index == 4 and torch.cuda.current_device() == 2
    with torch.cuda.device_of(x):
        assert torch.cuda.current_device() == 4
    with torch.device("cuda:1"):
        assert torch.ones(1).device.index == 1
    torch.set_default_device("cuda:6")
    try:
        assert torch.randn(2).device.index == 6
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize(
    "use",
    [lambda: torch.ones(1, device="cuda:8"), lambda: torch.cuda.set_device(9), lambda: torch.ones(1).cuda(12)],
    ids=["factory", "set_device", "cuda"],
)
def test_missing_device_is_an_invalid_ordinal(use):
    with pytest.raises(torch.AcceleratorError, match="CUDA error: invalid device ordinal"):
        use()


def test_a_thread_starts_on_device_0():
    torch.cuda.set_device(3)
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.ones(1, device="cuda").device.index))
    thread.start()
    thread.join()
    assert found == [0]


def test_modules_move_between_devices():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to("cuda:1")
    x = torch.randn(5, 4)
    y = model(x.cuda(1))
    assert {t.device.index for t in [*model.parameters(), *model.buffers(), y]} == {1}
    moved = copy.deepcopy(model).cuda(7)
    assert torch.equal(moved.eval()(x.cuda(7)).cpu(), model.eval()(x.cuda(1)).cpu())
    assert next(model.cpu().parameters()).device.type == "cpu"
    assert nn.Linear(2, 2, device="meta").to_empty(device="cuda:2").weight.device.index == 2


def test_copies_between_devices():
    x = torch.arange(6.0, device="cuda:1").view(2, 3)
    y = torch.empty(3, 2, device="cuda:2")
    y.copy_(x.t())
    assert torch.equal(y.cpu(), x.cpu().t())
    assert torch.equal(x.to("cuda:3", torch.float64).cpu(), x.cpu().double())
    assert x.to("cuda:1") is x and x.cuda(1) is x
    gradient = torch.ones(2, requires_grad=True)
    gradient.cuda(2).mul(3).cuda(5).sum().backward()
    assert gradient.grad.tolist() == [3, 3]


def test_data_parallel_uses_all_devices():
    model = nn.DataParallel(nn.Linear(4, 4).cuda(), device_ids=[0, 1, 2])
    x = torch.randn(6, 4)
    y = model(x.cuda())
    torch.testing.assert_close(y.cpu(), model.module.cpu()(x))
    assert y.device.index == 0


def test_properties():
    p = torch.cuda.get_device_properties(1)
    assert (p.major, p.minor) == torch.cuda.get_device_capability() == (9, 0)
    assert p.total_memory == torch.cuda.mem_get_info()[1] == 80 << 30
    assert torch.cuda.get_device_name(2) == p.name == "Simulated CUDA device"
    assert torch.cuda.is_bf16_supported() and torch.cuda.is_initialized()
    assert torch.cuda.get_arch_list() == ["sm_90"] and torch.version.cuda
    assert torch.cuda.can_device_access_peer(0, 1)
    assert not torch.cuda.is_current_stream_capturing()
    assert "Simulated" in torch.cuda.memory_summary() or torch.cuda.memory_summary()
    torch.cuda.synchronize()
    torch.accelerator.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.ipc_collect()


def test_streams_and_events():
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side != main
        before.record()
        x = torch.ones(8, device="cuda") * 2
        after.record()
    assert torch.cuda.current_stream() == main == torch.cuda.default_stream()
    main.wait_stream(side)
    x.record_stream(main)
    side.wait_event(after)
    after.synchronize()
    assert before.elapsed_time(after) >= 0 and after.query() and side.query()
    assert torch.cuda.Stream(2).device.index == 2 and torch.cuda.Stream(device="cuda:3").device.index == 3
    assert isinstance(side, torch.Stream) and isinstance(torch.cuda.ExternalStream, type)
    assert side.cuda_stream == side.stream_id and side.priority == 0
    with torch.cuda.device(2), torch.cuda.stream(torch.cuda.Stream()) as other:
        assert torch.cuda.current_stream().device.index == 2
    assert other is None or other
    assert {side: 1}[side] == 1 and "Stream" in repr(side) and "Event" in repr(before)


def test_event_without_record_has_no_time():
    with pytest.raises(ValueError, match="Both events must be recorded"):
        torch.cuda.Event(enable_timing=True).elapsed_time(torch.cuda.Event(enable_timing=True))


def test_tensor_types():
    x = torch.ones(2, device="cuda:1")
    assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(x.cpu(), torch.cuda.FloatTensor)
    assert x.type() == "torch.cuda.FloatTensor" and x.half().type() == "torch.cuda.HalfTensor"
    assert torch.ones(2).type("torch.cuda.LongTensor").dtype == torch.int64
    assert torch.ones(2).type(torch.cuda.HalfTensor).is_cuda and x.type(torch.FloatTensor).is_cpu
    assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2] and torch.cuda.ByteTensor(3).shape == (3,)


def test_generators():
    g = torch.Generator("cuda:1").manual_seed(3)
    assert g.device == torch.device("cuda:1") and g.initial_seed() == 3
    first = torch.randn(4, device="cuda:1", generator=g)
    state = g.get_state()
    second = torch.randn(4, device="cuda:1", generator=g)
    g.set_state(state)
    assert torch.equal(torch.randn(4, device="cuda:1", generator=g), second)
    assert torch.equal(torch.randn(4, device="cuda:1", generator=g.manual_seed(3)), first)
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        torch.rand(2, device="cuda", generator=torch.Generator())
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'cuda'"):
        torch.rand(2, generator=g)


DRAWS = {
    "rand": lambda: torch.rand(4, device="cuda"),
    "randperm": lambda: torch.randperm(9, device="cuda"),
    "randint": lambda: torch.randint(0, 9, (4,), device="cuda"),
    "normal": lambda: torch.normal(torch.zeros(4, device="cuda"), 1.0),
    "dropout": lambda: F.dropout(torch.ones(32, device="cuda")),
    "rrelu": lambda: F.rrelu(-torch.ones(4, device="cuda"), training=True),
    "multinomial": lambda: torch.multinomial(torch.ones(64, device="cuda"), 3),
    "bernoulli": lambda: torch.full((64,), 0.5, device="cuda").bernoulli(),
    "gumbel": lambda: F.gumbel_softmax(torch.ones(2, 4, device="cuda")),
    "sdpa": lambda: F.scaled_dot_product_attention(*[torch.ones(1, 1, 8, 8, device="cuda")] * 3, dropout_p=0.5),
    "init": lambda: nn.init.trunc_normal_(torch.empty(4, 4, device="cuda")),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draws_follow_the_seed_of_the_device(draw):
    host = torch.random.get_rng_state()
    state = torch.cuda.get_rng_state()
    first, second = draw(), draw()
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state)
    assert torch.equal(draw(), first)
    assert torch.equal(torch.random.get_rng_state(), host), "the generator of the CPU was used"


def test_random_states_of_all_devices():
    states = torch.cuda.get_rng_state_all()
    assert len(states) == 8
    first = torch.rand(3, device="cuda:5")
    torch.cuda.set_rng_state_all(states)
    assert torch.equal(torch.rand(3, device="cuda:5"), first)
    with torch.random.fork_rng(devices=[5]):
        torch.rand(3, device="cuda:5")
    torch.cuda.manual_seed_all(7)
    a = torch.rand(3, device="cuda:1")
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3, device="cuda:1"), a) and torch.cuda.initial_seed() == 7


def test_pinned_memory():
    pinned = torch.ones(3).pin_memory()
    assert pinned.is_pinned() and pinned[1:].is_pinned() and torch.empty(3, pin_memory=True).is_pinned()
    assert not torch.ones(3).is_pinned() and not torch.ones(3, device="cuda").is_pinned()
    assert pinned.cuda(non_blocking=True).to("cpu", non_blocking=True).tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
        torch.empty(3, device="cuda", pin_memory=True)
    data = torch.utils.data.TensorDataset(torch.arange(10.0))
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=5, pin_memory=True):
        assert batch.is_pinned()


def test_graphs_and_ipc_raise_by_name():
    for use in (torch.cuda.CUDAGraph, torch.cuda.graph_pool_handle):
        with pytest.raises(NotImplementedError, match="simulated device: a CUDA graph is not supported"):
            use()
    with pytest.raises(NotImplementedError, match="processes cannot share memory of a device"):
        ForkingPickler.dumps(torch.ones(1, device="cuda"))
    with pytest.raises(NotImplementedError, match="an event between processes"):
        torch.cuda.Event(interprocess=True)
