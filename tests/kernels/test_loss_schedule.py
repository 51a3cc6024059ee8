"""Schedules of the fused linear loss: every row is computed once, at its own teacher position."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.kernels.loss.linear_loss import StaticLossShape, build_loss_schedule

CPU = torch.device("cpu")


def test_loss_schedule_worked_example() -> None:
    schedule = build_loss_schedule(torch.tensor([7, 2, 7, 2, 5, 7]), 3, CPU)
    assert schedule.order_R.tolist() == [1, 3, 4, 0, 2, 5]
    assert schedule.positions_P.tolist() == [2, 5, 7]
    assert schedule.position_index_R.tolist() == [0, 0, 1, 2, 2, 2]
    assert schedule.chunks == [(slice(0, 3), slice(0, 2)), (slice(3, 6), slice(2, 3))]


@settings(max_examples=60, deadline=None)
@given(positions=st.lists(st.integers(0, 9), max_size=60), max_chunk_rows=st.integers(1, 20))
def test_schedule_computes_every_row_once(positions: list[int], max_chunk_rows: int) -> None:
    schedule = build_loss_schedule(torch.tensor(positions, dtype=torch.long), max_chunk_rows, CPU)
    found = {}
    for chunk_rows, chunk_positions in schedule.chunks:
        rows = range(chunk_rows.start, chunk_rows.stop)
        indices = range(chunk_positions.start, chunk_positions.stop)
        assert 0 < len(rows) <= max_chunk_rows and 0 < len(indices) <= max_chunk_rows
        for row in rows:
            index = int(schedule.position_index_R[row])
            assert index in indices
            found[int(schedule.order_R[row])] = int(schedule.positions_P[index])
    assert found == dict(enumerate(positions))
    assert sum(rows.stop - rows.start for rows, _ in schedule.chunks) == len(positions)


def test_static_loss_shape_worked_example() -> None:
    shape = StaticLossShape(num_rows=7, chunk_rows=3, chunk_positions=2)
    schedule = shape.build_schedule(torch.tensor([7, 2, 7, 2, 5]))
    assert schedule is not None
    assert schedule.order_R.tolist() == [1, 3, 4, 0, 2, 5, 6]
    assert schedule.positions_P.tolist() == [2, 5, 7, 7, 7, 7]
    assert schedule.position_index_R.tolist() == [0, 0, 1, 2, 2, 2, 4]


def test_static_loss_shape_refuses_too_many_positions() -> None:
    assert StaticLossShape(num_rows=4, chunk_rows=4, chunk_positions=2).build_schedule(torch.tensor([1, 2, 3])) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(0, 9), st.integers(1, 9))
def test_static_schedule_keeps_every_rows_position(positions: list[int], num_padding: int, size: int) -> None:
    shape = StaticLossShape(len(positions) + num_padding, size, size)
    schedule = shape.build_schedule(torch.tensor(positions))
    assert schedule is not None and sorted(schedule.order_R.tolist()) == list(range(shape.num_rows))
    for rows, chunk_positions in shape.chunks:
        assert rows.stop - rows.start <= size
        assert chunk_positions.stop - chunk_positions.start == size
        for i in range(rows.start, rows.stop):
            row, index = int(schedule.order_R[i]), int(schedule.position_index_R[i])
            assert chunk_positions.start <= index < chunk_positions.stop
            assert schedule.positions_P[index] == (positions[row] if row < len(positions) else max(positions))
