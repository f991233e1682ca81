// Read permit under Yama's scope 1 (stock Ubuntu), where a process is read by its ancestors alone,
// and by one process that it names together with that one's descendants. Ranks of a host name the
// nearest ancestor that they have in common, which is their launcher, so that they can read one
// another.
//
// The permit opens this: every other process that the launcher has started, as the same user and
// for as long as the group lives, may read and debug this rank, as it might without Yama. Nothing
// is named where the ranks have no ancestor but the first process, since then every process could.
// The kernel keeps one name only and cannot be asked for it, so a name that the user's code has
// given (PR_SET_PTRACER, for a debugger) is replaced; it is left alone where ranks can read each
// other already.
#pragma once
#include <sys/types.h>

#include <memory>
#include <vector>

namespace pycomm::read_permit {

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

}  // namespace pycomm::read_permit
