"""torch's own tests of `reconfigure`, which it shares between backends, on "pycomm".

They are taken from test/distributed/test_c10d_fault_tolerance.py of PyTorch (commit 032af12a), with
their comments. Changed: the list of backends, what is for CUDA and NCCL alone is left out, and
the layout is ours. Older versions of torch than 2.14 have no `reconfigure`; there
test_reconfigure.py tests the same through `pycomm.elastic`.

Copyright (c) PyTorch contributors, under the BSD 3-clause licence of PyTorch:

Redistribution and use in source and binary forms, with or without modification, are permitted
provided that the following conditions are met: 1. Redistributions of source code must retain the
above copyright notice, this list of conditions and the following disclaimer. 2. Redistributions in
binary form must reproduce the above copyright notice, this list of conditions and the following
disclaimer in the documentation and/or other materials provided with the distribution. 3. Neither
the names of Facebook, Deepmind Technologies, NYU, NEC Laboratories America and IDIAP Research
Institute nor the names of its contributors may be used to endorse or promote products derived from
this software without specific prior written permission.

THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT HOLDERS AND CONTRIBUTORS "AS IS" AND ANY EXPRESS OR
IMPLIED WARRANTIES, INCLUDING, BUT NOT LIMITED TO, THE IMPLIED WARRANTIES OF MERCHANTABILITY AND
FITNESS FOR A PARTICULAR PURPOSE ARE DISCLAIMED. IN NO EVENT SHALL THE COPYRIGHT OWNER OR
CONTRIBUTORS BE LIABLE FOR ANY DIRECT, INDIRECT, INCIDENTAL, SPECIAL, EXEMPLARY, OR CONSEQUENTIAL
DAMAGES (INCLUDING, BUT NOT LIMITED TO, PROCUREMENT OF SUBSTITUTE GOODS OR SERVICES; LOSS OF USE,
DATA, OR PROFITS; OR BUSINESS INTERRUPTION) HOWEVER CAUSED AND ON ANY THEORY OF LIABILITY, WHETHER
IN CONTRACT, STRICT LIABILITY, OR TORT (INCLUDING NEGLIGENCE OR OTHERWISE) ARISING IN ANY WAY OUT OF
THE USE OF THIS SOFTWARE, EVEN IF ADVISED OF THE POSSIBILITY OF SUCH DAMAGE.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

if not hasattr(dist, "_reconfigure"):
    pytest.skip("torch has no reconfigure before 2.14", allow_module_level=True)

from torch.testing._internal.common_distributed import MultiProcessTestCase

import pycomm.backend  # noqa: F401  (registers the backend in the processes that it starts)


class PycommFaultToleranceTest(MultiProcessTestCase):
    backend_name = "pycomm"
    device = "cpu"

    @property
    def world_size(self) -> int:
        return 3

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def tearDown(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        super().tearDown()
        try:
            os.remove(self.file_name)
        except OSError:
            pass

    def _create_store(self) -> Any:
        return dist.FileStore(self.file_name, self.world_size)

    def _init_reconfigurable_pg(self) -> None:
        self.store = self._create_store()
        dist.init_process_group(
            self.backend_name,
            world_size=self.world_size,
            rank=self.rank,
            store=self.store,
            timeout=timedelta(seconds=30),
            enable_reconfigure=True,
        )
        self.pg = c10d._get_default_group()
        self.backend = dist.get_backend_impl(self.pg, torch.device(self.device))
        self.assertTrue(dist._supports_reconfigure())
        self.assertTrue(self.backend.supports_reconfigure)

    def _collect_handles(self, key_prefix: str) -> list[str]:
        handle = dist._get_reconfigure_handle()
        self.store.set(f"{key_prefix}_{self.rank}", handle)
        return [
            self.store.get(f"{key_prefix}_{rank}").decode("utf-8")
            for rank in range(self.world_size)
        ]

    def _store_barrier(self, key_prefix: str) -> None:
        self.store.set(f"{key_prefix}_{self.rank}", "1")
        for rank in range(self.world_size):
            self.store.get(f"{key_prefix}_{rank}")

    def _reconfigure(self, uuid: int, handles: list[str]) -> None:
        work = dist._reconfigure(uuid, handles, timeout=timedelta(seconds=30))
        work.wait()

    def _create_reconfigured_pg(self, name: str, uuid: int) -> list[str]:
        self._init_reconfigurable_pg()
        handles = self._collect_handles(f"{name}_init")
        self._reconfigure(uuid, handles)
        self.assertEqual(dist.get_world_size(), self.world_size)
        self.assertEqual(dist.get_rank(), self.rank)
        return self._collect_handles(f"{name}_post")

    def _assert_all_reduce_sum(self, expected_value: float) -> None:
        tensor = torch.full((4,), dist.get_rank() + 1.0, device=self.device)
        dist.all_reduce(tensor)
        expected = torch.full((4,), expected_value, dtype=tensor.dtype)
        self.assertEqual(tensor.cpu(), expected)

    def test_reconfigure_basic(self) -> None:
        self._create_reconfigured_pg("ft_basic", 100)

    def test_reconfigure_then_all_reduce(self) -> None:
        self._create_reconfigured_pg("ft_all_reduce", 200)
        self._assert_all_reduce_sum(sum(range(1, self.world_size + 1)))

    def test_reconfigure_then_send_recv(self) -> None:
        self._create_reconfigured_pg("ft_send_recv", 300)

        rank = dist.get_rank()
        send_rank = (rank + 1) % self.world_size
        recv_rank = (rank - 1 + self.world_size) % self.world_size
        send_tensor = torch.full((4,), rank + 1.0, device=self.device)
        recv_tensor = torch.zeros(4, device=self.device)

        if rank % 2 == 0:
            send_work = self.backend.send([send_tensor], send_rank, 0)
            recv_work = self.backend.recv([recv_tensor], recv_rank, 0)
        else:
            recv_work = self.backend.recv([recv_tensor], recv_rank, 0)
            send_work = self.backend.send([send_tensor], send_rank, 0)

        send_work.wait()
        recv_work.wait()
        self.assertEqual(recv_tensor.cpu(), torch.full((4,), recv_rank + 1.0))

    def test_shrink_exclude_last_rank(self) -> None:
        handles = self._create_reconfigured_pg("ft_shrink_last", 400)
        excluded_rank = self.world_size - 1
        if self.rank == excluded_rank:
            self._store_barrier("ft_shrink_last_done")
            return

        self._reconfigure(401, handles[:excluded_rank])
        self.assertEqual(dist.get_world_size(), self.world_size - 1)
        self.assertEqual(dist.get_rank(), self.rank)
        self._assert_all_reduce_sum(sum(range(1, self.world_size)))

        tensor = torch.zeros(4, device=self.device)
        if dist.get_rank() == 0:
            tensor.fill_(42.0)
        dist.broadcast(tensor, group_src=0)
        self.assertEqual(tensor.cpu(), torch.full((4,), 42.0))
        self._store_barrier("ft_shrink_last_done")

    def test_shrink_exclude_middle_rank(self) -> None:
        handles = self._create_reconfigured_pg("ft_shrink_middle", 500)
        excluded_rank = self.world_size // 2
        if self.rank == excluded_rank:
            self._store_barrier("ft_shrink_middle_done")
            return

        surviving_handles = [handle for rank, handle in enumerate(handles) if rank != excluded_rank]
        self._reconfigure(501, surviving_handles)

        expected_rank = self.rank if self.rank < excluded_rank else self.rank - 1
        self.assertEqual(dist.get_world_size(), self.world_size - 1)
        self.assertEqual(dist.get_rank(), expected_rank)
        self._assert_all_reduce_sum(sum(range(1, self.world_size)))
        self._store_barrier("ft_shrink_middle_done")

    def test_reconfigure_scale_down_up(self) -> None:
        self._init_reconfigurable_pg()
        # Each rank shrinks to its own disjoint group, so each needs a unique uuid.
        self._reconfigure(600 + self.rank, [dist._get_reconfigure_handle()])
        self.assertEqual(dist.get_world_size(), 1)
        self.assertEqual(dist.get_rank(), 0)

        handles = self._collect_handles("ft_scale_down_up")
        self._reconfigure(603, handles)
        self.assertEqual(dist.get_world_size(), self.world_size)
        self.assertEqual(dist.get_rank(), self.rank)

        self._reconfigure(604 + self.rank, [dist._get_reconfigure_handle()])
        self.assertEqual(dist.get_world_size(), 1)
        self.assertEqual(dist.get_rank(), 0)
        self._store_barrier("ft_scale_down_up_done")

    def test_reconfigure_single_to_all(self) -> None:
        self._init_reconfigurable_pg()
        # Each rank shrinks to its own disjoint group, so each needs a unique uuid.
        self._reconfigure(700 + self.rank, [dist._get_reconfigure_handle()])

        handles = self._collect_handles("ft_single_to_all")
        self._reconfigure(703, handles)
        self._assert_all_reduce_sum(sum(range(1, self.world_size + 1)))

    def test_reconfigure_identity(self) -> None:
        self._create_reconfigured_pg("ft_identity", 800)
        handles = self._collect_handles("ft_identity_again")
        self._reconfigure(801, handles)
        self._assert_all_reduce_sum(sum(range(1, self.world_size + 1)))

    def test_reconfigure_late_join(self) -> None:
        self._init_reconfigurable_pg()
        handles = self._collect_handles("ft_late_join_initial")
        initial_world_size = self.world_size // 2
        if self.rank < initial_world_size:
            self._reconfigure(900, handles[:initial_world_size])

        handles = self._collect_handles("ft_late_join_all")
        self._reconfigure(901, handles)
        self._assert_all_reduce_sum(sum(range(1, self.world_size + 1)))

    def test_reconfigure_merge_split(self) -> None:
        self._init_reconfigurable_pg()
        handles = self._collect_handles("ft_merge_split_initial")
        split = self.world_size // 2
        if self.rank < split:
            self._reconfigure(1000, handles[:split])
        else:
            self._reconfigure(1001, handles[split:])

        handles = self._collect_handles("ft_merge_split_all")
        self._reconfigure(1002, handles)
        self._assert_all_reduce_sum(sum(range(1, self.world_size + 1)))

    def test_reconfigure_after_abort(self) -> None:
        # Port of torchcomms' ReconfigureTest.test_reconfigure_after_abort:
        # abort() (a revoke in reconfigurable mode) must be recoverable by a
        # reconfigure() with a fresh uuid.
        self._create_reconfigured_pg("ft_abort", 1200)
        self.backend.abort()

        from torch._C._distributed_c10d import ErrorType

        self.assertEqual(self.backend.get_error(), ErrorType.SUCCESS)

        handles = self._collect_handles("ft_abort_recover")
        self._reconfigure(1201, handles)
        self._assert_all_reduce_sum(sum(range(1, self.world_size + 1)))

    def test_reconfigure_rejects_reused_uuid(self) -> None:
        self._init_reconfigurable_pg()
        uuid = 1100 + self.rank
        self._reconfigure(uuid, [dist._get_reconfigure_handle()])
        with self.assertRaisesRegex(RuntimeError, "already used"):
            self._reconfigure(uuid, [dist._get_reconfigure_handle()])
