// Cross-memory attach (cma): the kernel reads memory of another process of this host
// (process_vm_readv). There is one copy, from where the data lie to where they are wanted, and no
// memory needs preparation.
//
// Ranks find out once whether it is permitted, by trying at the rendezvous: containers, Yama,
// seccomp and processes that are not dumpable may forbid it. Memory that cannot be read goes
// through staging.
#pragma once
#include <sys/types.h>

#include <memory>
#include <vector>

#include "transports/shm/region.h"

namespace pycomm::cma {

/// True if we can read what a rank has signed in that rank's own memory: its number is right.
bool proves(const RankSlot& theirs);

/// True if we can read the memory of all other ranks, all of which have signed. False if one of
/// them shares our process: threads gain nothing by it.
bool readable(const SharedRegion& region, int self);

/// True if the `bytes` at `data` are memory that the kernel copies for other processes; memory of
/// devices is not. Tests the first and the last byte.
bool showable(const void* data, size_t bytes);

/// Returns 0, or the errno. A process that is gone gives ESRCH.
int read(pid_t process, const void* from, void* to, size_t bytes);

/// Read permit under Yama's scope 1 (stock Ubuntu), where a process is read by its ancestors alone,
/// and by one process that it names together with that one's descendants. Ranks of a host name the
/// nearest ancestor that they have in common, which is their launcher, so that they can read one
/// another.
///
/// The permit opens this: every other process that the launcher has started, as the same user and
/// for as long as the group lives, may read and debug this rank, as it might without Yama. Nothing
/// is named where the ranks have no ancestor but the first process, since then every process could.
/// The kernel keeps one name only and cannot be asked for it, so a name that the user's code has
/// given (PR_SET_PTRACER, for a debugger) is replaced; it is left alone where ranks can read each
/// other already.
namespace permit {

/// True if Yama lets ranks read one another only by such a name.
bool wanted();
/// Returns the nearest process that has started them all, or is one of them; 0 if only the first
/// one has.
pid_t common_ancestor(const std::vector<pid_t>& processes);
/// Returns the permit that other groups of this process have given, which then lives for ours too;
/// or null.
std::shared_ptr<void> held();
/// Names the ancestor while the result lives; null if the kernel does not take it. Groups of this
/// process share the permit: the last one takes it back.
std::shared_ptr<void> name(pid_t ancestor);

}  // namespace permit

}  // namespace pycomm::cma
