// Memory of another process of this host, read by the kernel (process_vm_readv): one copy, from
// where the data lie to where they are wanted, and nobody prepares anything.
//
// Whether it is permitted is found by trying, once, when ranks have met: containers, Yama, seccomp
// and processes that are not dumpable may forbid it. What cannot be read goes through staging.
#pragma once
#include "transports/segment.h"

namespace pycomm::peer_memory {

/// True if we can read the memory of all other ranks. All have signed. False if one of them shares
/// our process: threads gain nothing by it.
bool readable(const Segment& segment, int self);

/// True if `bytes` at `data` are memory that the kernel copies for others; that of devices is not.
/// Looks at both ends.
bool showable(const void* data, size_t bytes);

/// 0, or the errno. A process that is gone is ESRCH.
int read(pid_t process, const void* from, void* to, size_t bytes);

}  // namespace pycomm::peer_memory
