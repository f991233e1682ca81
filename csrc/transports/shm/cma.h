// Cross-memory attach (cma): the kernel reads memory of another process of this host
// (process_vm_readv). There is one copy, from where the data lie to where they are wanted, and no
// memory needs preparation.
//
// Ranks find out once whether it is permitted, by trying at the rendezvous: containers, Yama,
// seccomp and processes that are not dumpable may forbid it. Memory that cannot be read goes
// through staging.
#pragma once
#include "transports/shm/region.h"

namespace pycomm::cma {

/// True if we can read the memory of all other ranks, all of which have signed. False if one of
/// them shares our process: threads gain nothing by it.
bool readable(const SharedRegion& region, int self);

/// True if the `bytes` at `data` are memory that the kernel copies for other processes; memory of
/// devices is not. Tests the first and the last byte.
bool showable(const void* data, size_t bytes);

/// Returns 0, or the errno. A process that is gone gives ESRCH.
int read(pid_t process, const void* from, void* to, size_t bytes);

}  // namespace pycomm::cma
