// Shared file: memory of one rank of a host that others of it map as well. Nothing has a name in a
// file system, so nothing can be left behind.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "transports/host_socket.h"
#include "transports/rendezvous.h"

namespace pycomm {

/// What a rank publishes if an attempt has succeeded; any other value says why it has not.
constexpr char kYes[] = "yes";
/// The name of a host socket that could not be made.
constexpr char kUnavailable[] = "none";

/// Makes an attempt of which the others will learn. Returns kYes, or the text of its Error; what
/// ends the whole rendezvous is thrown.
template <typename Try>
std::string outcome_of(const Try& attempt) {
  try {
    attempt();
    return kYes;
  } catch (const Timeout&) {
    throw;
  } catch (const PeerLost&) {
    throw;
  } catch (const Error& problem) {
    return problem.what();
  }
}

/// Makes a memory file, which peers cannot shrink under us. Throws Error, which begins with `what`.
Fd make_memory_file(const std::string& what, size_t bytes);

/// Where the ranks that share a file publish what.
struct SharedFileTopics {
  std::string what;      ///< for error texts, "shm"
  std::string name;      ///< word of the host socket of the rank that makes the file
  std::string outcomes;  ///< of each rank, afterwards
};

/// Shares a file among `ranks`: the first of them calls make(), which returns a descriptor that
/// stays open, and passes it on until every other has it or has published its outcome. The others
/// call take() with theirs. `announced`: the socket of the first, and the names of all ranks', if
/// they have been exchanged already. Throws Error if we cannot have the file.
void share_file(const Rendezvous& rendezvous, const std::vector<int>& ranks,
                const SharedFileTopics& topics, const std::shared_ptr<HostSocket>& announced,
                const std::function<int()>& make, const std::function<void(Fd)>& take);

}  // namespace pycomm
