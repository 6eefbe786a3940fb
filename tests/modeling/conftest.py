"""What the tests of attention share: a watch over the size of what is made."""

import pytest
import torch


@pytest.fixture
def watch():
    """A context manager; its `largest` is the number of elements in the largest storage that an operation returned."""

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, torch.Tensor):
                    self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
            return result

    return Watch()
