"""Static inputs: one copy, two host buffers in turn, and padding wherever nothing was written."""

import numpy as np
import torch

from speculative.gpu.capture import copy_once
from speculative.gpu.staged_inputs import Field, StagedInputs

CPU = torch.device("cpu")
FIELDS = {
    "flags": Field((3,), torch.bool, 1),
    "ids": Field((2, 2), padding=-1),
    "weights": Field((3, 1), torch.float32, 1.0),
    "accept_uniforms": Field((2,), torch.float64, 0.5),
    "none": Field((0,)),
}


def test_what_is_sent_arrives_where_the_captured_function_looks_and_nothing_else_changes() -> None:
    inputs = StagedInputs(FIELDS, CPU)
    before = {name: tensor.data_ptr() for name, tensor in inputs.on_device.items()}
    for name, field in FIELDS.items():
        tensor = inputs.on_device[name]
        assert (tensor.shape, tensor.dtype) == (field.shape, field.dtype) and (tensor == field.padding).all()
    host = inputs.next_host()
    host["ids"][0] = [2**62 + 1, -7]
    host["accept_uniforms"][1] = 1 - 2**-52
    host["weights"][2] = 0.25
    host["flags"][0] = False
    assert (inputs.on_device["ids"] == -1).all(), "nothing arrives before it is sent"
    inputs.send()
    assert inputs.on_device["ids"].tolist() == [[2**62 + 1, -7], [-1, -1]]
    assert inputs.on_device["accept_uniforms"].tolist() == [0.5, 1 - 2**-52]
    assert inputs.on_device["weights"].flatten().tolist() == [1.0, 1.0, 0.25]
    assert inputs.on_device["flags"].tolist() == [False, True, True]
    assert {name: tensor.data_ptr() for name, tensor in inputs.on_device.items()} == before


def test_of_a_field_sent_in_part_the_rest_stays() -> None:
    inputs = StagedInputs({"table": Field((3, 2), torch.int32, in_part=True), **FIELDS}, CPU)
    for value, num_rows in ((1, 3), (2, 1), (3, 0)):
        host = inputs.next_host()
        host["table"][:num_rows], host["ids"][:] = value, value
        inputs.send(num_rows)
    assert inputs.on_device["table"].tolist() == [[2, 2], [1, 1], [1, 1]]
    assert (inputs.on_device["ids"] == 3).all()
    assert (inputs.on_device["accept_uniforms"] == 0.5).all()


def test_the_two_host_buffers_take_turns_and_forget_what_they_held() -> None:
    inputs = StagedInputs(FIELDS, CPU)
    first = inputs.next_host()
    first["ids"][:] = 5
    inputs.send()
    second = inputs.next_host()
    assert not np.shares_memory(first["ids"], second["ids"]), "a copy under way is not written over"
    inputs.send()
    assert (inputs.on_device["ids"] == -1).all(), "what an earlier step wrote is gone"
    third = inputs.next_host()
    assert np.shares_memory(first["ids"], third["ids"])
    assert (third["ids"] == -1).all()


def test_one_vector_carries_whole_numbers_and_floats_exactly() -> None:
    vector = copy_once([torch.tensor([[2**40 + 1], [-3]]), torch.tensor(0.1), torch.tensor([True])])
    assert vector.dtype == torch.float64
    assert vector.tolist() == [2**40 + 1, -3, float(np.float32(0.1)), 1.0]
