#include "transports/shm/peer_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "transports/fd.h"
#include "transports/shm/cma.h"

namespace pycomm {
namespace {

// The numbers are the same on all machines but Alpha; headers older than the kernel lack them.
constexpr long kPidfdSendSignal = 424;
constexpr long kPidfdOpen = 434;
constexpr long kUnknown = -2;

/// Returns the kernel's number of a pidfd's process: 0 if it has none here, -1 if it is gone,
/// kUnknown if that cannot be told.
long process_of(int fd) {
  std::ifstream file("/proc/self/fdinfo/" + std::to_string(fd));
  for (std::string word; file >> word;) {
    long process;
    if (word == "Pid:" && file >> process) return process;
  }
  return kUnknown;
}

/// Groups of one process share the descriptors of its peers: a host may have 256 ranks.
std::shared_ptr<PidFd> open_shared(const RankSlot& rank_slot) {
  using Key = std::tuple<uint64_t, uint64_t, uint64_t>;
  static std::mutex mutex;
  static std::map<Key, std::weak_ptr<PidFd>> known;
  const auto open = [&] {
    return std::make_shared<PidFd>(
        static_cast<int>(::syscall(kPidfdOpen, static_cast<pid_t>(rank_slot.process[0]), 0)));
  };
  if (rank_slot.birth == 0) return open();
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto one = known.begin(); one != known.end();) {
    one = one->second.expired() ? known.erase(one) : std::next(one);
  }
  std::weak_ptr<PidFd>& place =
      known[Key{rank_slot.process[0], rank_slot.process[1], rank_slot.birth}];
  std::shared_ptr<PidFd> found = place.lock();
  if (!found || !found->ours()) place = found = open();
  return found;
}

}  // namespace

PidFd::PidFd(int fd) : fd_(beyond_streams(fd)), process_(fd_ < 0 ? kUnknown : process_of(fd_)) {}

PidFd::~PidFd() {
  if (fd_ >= 0 && ours()) ::close(fd_);
}

bool PidFd::ours() const {
  if (fd_ < 0) return false;
  // Signal 0 sends nothing. EBADF means that the descriptor is no pidfd.
  if (::syscall(kPidfdSendSignal, fd_, 0, nullptr, 0) != 0 && errno == EBADF) return false;
  const long process = process_of(fd_);
  return process == process_ || process == -1 || process == kUnknown || process_ == kUnknown;
}

PeerProcess::PeerProcess(const RankSlot& rank_slot)
    : rank_slot_(rank_slot),
      reads_(cma::showable(rank_slot.process, sizeof rank_slot.process)),
      process_(static_cast<pid_t>(rank_slot.process[0]),
               rank_slot.birth == 0 ? "" : std::to_string(rank_slot.birth)),
      handle_(open_shared(rank_slot)) {
  if (handle_->get() < 0) handle_.reset();
  // The process may have died before we asked, and its number may be another's.
  if (process_.died()) dead(how_);
}

bool PeerProcess::dead(const char* how) {
  if (!ended_.exchange(true)) how_ = how;
  return true;
}

bool PeerProcess::ended(int events) {
  if (ended_) return true;
  if (events == 0) return false;
  if (handle_->ours()) return dead(how_);
  lost_ = true;
  return ended();
}

bool PeerProcess::ended() {
  if (ended_) return true;
  pollfd wanted = {fd(), POLLIN, 0};
  if (wanted.fd >= 0) return ::poll(&wanted, 1, 0) > 0 && ended(wanted.revents);
  return ::kill(process_.id(), 0) != 0 && errno == ESRCH && dead(how_);
}

bool PeerProcess::check_proc() {
  // Another file under its number need never be ready.
  if (fd() >= 0 && !handle_->ours()) lost_ = true;
  if (ended()) return true;
  if (fd() < 0 && process_.died()) return dead(how_);
  if (process_.dumps()) return dead("its process has crashed and writes a core dump");
  if (!reads_) return false;
  uint64_t seen[2] = {};
  const auto* from = reinterpret_cast<const RankSlot*>(rank_slot_.address)->process;
  // If reading is forbidden it tells nothing.
  const int error = cma::read(process_.id(), from, seen, sizeof seen);
  const bool other = error == 0 && std::memcmp(seen, rank_slot_.process, sizeof seen) != 0;
  if (error != EFAULT && !other) return false;
  // The rank may have left at this moment, and then its rank slot says so.
  if (rank_slot_.left.load(std::memory_order_acquire) != 0) return false;
  return dead("its process has called exec() and is another program now");
}

}  // namespace pycomm
