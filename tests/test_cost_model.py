"""What an all-reduce costs."""

import pytest

from lightning_dp.insight.cost_model import ideal_finish, ring_all_reduce_bytes, transport_share

ITEM = 8  # bytes of an element


def ring_all_reduce(buffers: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """A ring all-reduce, chunk by chunk: what each rank holds at the end, and the bytes that each has sent."""
    n, numel = len(buffers), len(buffers[0])
    buffers = [list(buffer) for buffer in buffers]
    cuts = [numel * chunk // n for chunk in range(n + 1)]
    sent = [0] * n
    for reduce in (True, False):  # reduce-scatter, then all-gather
        for turn in range(n - 1):
            letters = []
            for rank in range(n):
                chunk = (rank - turn + (not reduce)) % n
                span = range(cuts[chunk], cuts[chunk + 1])
                letters.append(((rank + 1) % n, span, [buffers[rank][i] for i in span]))
                sent[rank] += ITEM * len(span)
            for receiver, span, values in letters:
                for i, value in zip(span, values, strict=True):
                    buffers[receiver][i] = buffers[receiver][i] + value if reduce else value
    return buffers, sent


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("per_chunk", [1, 7])
def test_a_ring_sends_what_the_formula_says(n, per_chunk):
    numel = n * per_chunk
    buffers = [[(rank + 1) * 1000 + i for i in range(numel)] for rank in range(n)]
    reduced, sent = ring_all_reduce(buffers)
    assert reduced == [[sum(column) for column in zip(*buffers, strict=True)]] * n  # it is an all-reduce
    assert sent == [ring_all_reduce_bytes(ITEM * numel, n)] * n


@pytest.mark.parametrize(("n", "numel"), [(2, 7), (3, 10), (4, 1), (5, 3), (8, 61)])
def test_where_chunks_are_uneven_the_formula_is_the_mean_over_ranks(n, numel):
    buffers = [[rank * 100 + i for i in range(numel)] for rank in range(n)]
    reduced, sent = ring_all_reduce(buffers)
    assert reduced == [[sum(column) for column in zip(*buffers, strict=True)]] * n
    assert sum(sent) / n == pytest.approx(ring_all_reduce_bytes(ITEM * numel, n), rel=1e-12)


@pytest.mark.parametrize(
    ("payload", "n", "expected"),
    [(100, 1, 0), (0, 8, 0), (100, 2, 100), (100, 4, 150), (1.5, 3, 2.0), (1024, 1024, 2046)],
)
def test_known_values(payload, n, expected):
    assert ring_all_reduce_bytes(payload, n) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("payload", "n", "message"),
    [
        (1, 0, "world_size must be at least 1, got 0"),
        (1, -2, "got -2"),
        (-1, 2, "payload must not be negative, got -1"),
    ],
)
def test_impossible_arguments_are_refused(payload, n, message):
    with pytest.raises(ValueError, match=message):
        ring_all_reduce_bytes(payload, n)


# ---------------------------------------------------------------------------------------------- the ideal reduction


def fluid(ready, nbytes, end, seconds_per_byte, share, tick=1e-4):
    """The same in small ticks of time: what is ready flows out, and backward runs slower while something flows."""
    now, progress, backlog, left = 0.0, 0.0, 0.0, sorted(zip(ready, nbytes, strict=True))
    while progress < end - 1e-9 or backlog > 1e-9 or left:
        while left and left[0][0] <= progress + 1e-9:
            backlog += left.pop(0)[1] * seconds_per_byte
        progress = min(end, progress + tick * ((1 - share) if backlog > 0 else 1))
        backlog = max(0.0, backlog - tick)
        now += tick
    return now


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("seconds_per_byte", [0.001, 0.02, 0.2])
def test_the_ideal_finish_is_that_of_a_fluid(share, seconds_per_byte):
    ready, nbytes = [0.1, 0.15, 0.4, 0.41, 0.5], [3, 1, 4, 1, 5]
    expected = fluid(ready, nbytes, 0.55, seconds_per_byte, share)
    assert ideal_finish(ready, nbytes, 0.55, seconds_per_byte, share) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize(
    ("ready", "nbytes", "end", "beta", "share", "expected"),
    [
        pytest.param([], [], 2.0, 1.0, 0.5, 2.0, id="nothing to send"),
        pytest.param([1.0], [3], 1.0, 1.0, 0.0, 4.0, id="all exposed"),
        pytest.param([1.0], [3], 6.0, 1.0, 0.0, 6.0, id="all hidden"),
        pytest.param([1.0], [2], 6.0, 1.0, 0.5, 7.0, id="hidden, but it slows compute down by half for two seconds"),
        pytest.param([1.0], [2], 6.0, 1.0, 1.0, 8.0, id="compute stands still meanwhile"),
        pytest.param([3.0, 1.0], [1, 2], 3.0, 1.0, 0.0, 4.0, id="the order of parameters is not that of time"),
    ],
)
def test_known_ideal_finishes(ready, nbytes, end, beta, share, expected):
    assert ideal_finish(ready, nbytes, end, beta, share) == pytest.approx(expected, rel=1e-12)


def test_a_share_must_be_one():
    with pytest.raises(ValueError, match=r"between 0 and 1, got 1\.5"):
        ideal_finish([1.0], [1], 1.0, 1.0, 1.5)


@pytest.mark.parametrize(
    ("alone", "beside", "transfer", "end", "expected"),
    [
        pytest.param(1.0, 1.0, 0.5, 0.5, 0.0, id="none taken"),
        pytest.param(1.0, 1.25, 0.5, 0.6, 0.5, id="half of the half second that the link was busy"),
        pytest.param(1.0, 1.5, 3.0, 3.0, 1 / 3, id="the transfer outlasts the computation: half of it counts"),
        pytest.param(1.0, 2.0, 0.5, 0.5, 1.0, id="more than all is all"),
        pytest.param(1.0, 0.9, 0.5, 0.5, 0.0, id="noise is not negative"),
    ],
)
def test_the_share_of_the_transport(alone, beside, transfer, end, expected):
    assert transport_share(alone, beside, transfer, end) == pytest.approx(expected, rel=1e-12)


def test_the_share_measured_on_the_fluid_is_the_fluids():
    alone, transfer, share = 2.0, 0.5, 0.4
    beside = fluid([0.0], [1], alone, transfer, share)
    assert transport_share(alone, beside, transfer, transfer) == pytest.approx(share, abs=1e-2)
