#include "transports/shared_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <set>

namespace pycomm {
namespace {

void pass_on(const Rendezvous& rendezvous, const std::vector<int>& ranks,
             const std::string& outcomes, const HostSocket& socket, int fd) {
  std::set<int> silent(ranks.begin() + 1, ranks.end());
  size_t served = 0;
  while (served < ranks.size() - 1 && !silent.empty() && !rendezvous.deadline.expired()) {
    if (socket.serve(fd, rendezvous.poll_interval())) {
      served += 1;
      continue;
    }
    rendezvous.interrupt_check();
    const std::vector<int> wanted(silent.begin(), silent.end());
    for (const auto& [rank, word] :
         published_values(rendezvous, outcomes, ranks, wanted, rendezvous.poll_interval())) {
      silent.erase(rank);
    }
  }
}

}  // namespace

Fd make_memory_file(const std::string& what, size_t bytes) {
  Fd fd(::memfd_create(("pycomm-" + what).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw_errno(what + ": cannot make a memory file");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    throw_errno(what + ": cannot size a memory file");
  }
  ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  return fd;
}

void share_file(const Rendezvous& rendezvous, const std::vector<int>& ranks,
                const SharedFileTopics& topics, const std::shared_ptr<HostSocket>& announced,
                const std::function<int()>& make, const std::function<void(Fd)>& take) {
  const int first = ranks.front();
  const auto names = rendezvous.exchange->received.find(topics.name);
  const bool known = names != rendezvous.exchange->received.end();
  if (rendezvous.rank != first) {
    const std::string name =
        known ? names->second[static_cast<size_t>(first)] : word_of(rendezvous, topics.name, first);
    if (name == kUnavailable) {
      throw Error(topics.what + ": rank " + std::to_string(first) +
                  " could not make the shared memory; look at its own log");
    }
    return take(receive_fd(name, rendezvous.deadline, rendezvous.interrupt_check));
  }
  const auto publish = [&](const std::string& name) {
    if (!announced) set_word(rendezvous, word_name(topics.name, first), name);
  };
  try {
    // The socket is closed at the end, so that no rank waits for a file in vain.
    const auto socket = announced ? announced : std::make_shared<HostSocket>();
    const int fd = make();
    publish(socket->name());
    pass_on(rendezvous, ranks, topics.outcomes, *socket, fd);
  } catch (const Error&) {
    publish(kUnavailable);
    throw;
  }
}

}  // namespace pycomm
