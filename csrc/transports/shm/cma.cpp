
#include "transports/shm/cma.h"

#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <mutex>

#include "transports/process.h"

namespace pycomm::cma {

bool proves(const RankSlot& theirs) {
  uint64_t seen[2] = {};
  const auto* from = reinterpret_cast<const RankSlot*>(theirs.address)->process;
  return read(static_cast<pid_t>(theirs.process[0]), from, seen, sizeof seen) == 0 &&
         std::memcmp(seen, theirs.process, sizeof seen) == 0;
}

bool readable(const SharedRegion& region, int self) {
  const RankSlot& ours = region.rank_slot(self);
  for (int r = 0; r < region.ranks(); r++) {
    if (r == self) continue;
    const RankSlot& theirs = region.rank_slot(r);
    if (theirs.process[0] == ours.process[0] || !proves(theirs)) return false;
  }
  return true;
}

bool showable(const void* data, size_t bytes) {
  const auto* begin = static_cast<const uint8_t*>(data);
  uint8_t ends[2];
  const pid_t self = ::getpid();
  return read(self, begin, &ends[0], 1) == 0 && read(self, begin + bytes - 1, &ends[1], 1) == 0;
}

int read(pid_t process, const void* from, void* to, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const iovec local{static_cast<uint8_t*>(to) + done, bytes - done};
    const iovec remote{const_cast<uint8_t*>(static_cast<const uint8_t*>(from)) + done,
                       bytes - done};
    const ssize_t got = ::process_vm_readv(process, &local, 1, &remote, 1, 0);
    if (got <= 0) return got < 0 ? errno : EFAULT;
    done += static_cast<size_t>(got);
  }
  return 0;
}

namespace permit {

namespace {

/// Defined here because some headers lack it.
constexpr int kSetPtracer = 0x59616d61;

/// The name that the groups of this process have given. Never destroyed: groups may end after that.
struct Given {
  std::mutex mutex;
  std::weak_ptr<void> permit;
  pid_t process = 0;  ///< that has given it: its forked children start without

  /// Under the mutex. Null if there is none.
  std::shared_ptr<void> ours() { return process == ::getpid() ? permit.lock() : nullptr; }
};

Given& given() {
  static Given* const given = new Given;
  return *given;
}

}  // namespace

bool wanted() {
  int scope = 0;
  std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> scope;
  return scope == 1;
}

pid_t common_ancestor(const std::vector<pid_t>& processes) {
  if (processes.empty()) return 0;
  std::vector<std::vector<pid_t>> lines;  // each process, its parent and so on, but the first one
  for (pid_t one : processes) {
    std::vector<pid_t>& line = lines.emplace_back();
    for (; one > 1 && std::find(line.begin(), line.end(), one) == line.end(); one = parent_of(one))
      line.push_back(one);
  }
  for (const pid_t candidate : lines.front()) {
    const bool all = std::all_of(lines.begin(), lines.end(), [&](const std::vector<pid_t>& line) {
      return std::find(line.begin(), line.end(), candidate) != line.end();
    });
    if (all) return candidate;
  }
  return 0;
}

std::shared_ptr<void> held() {
  const std::lock_guard<std::mutex> lock(given().mutex);
  return given().ours();
}

std::shared_ptr<void> name(pid_t ancestor) {
  const std::lock_guard<std::mutex> lock(given().mutex);
  std::shared_ptr<void> permit = given().ours();
  if (permit) return permit;  // siblings have the same launcher
  if (ancestor <= 1 || ::prctl(kSetPtracer, ancestor, 0, 0, 0) != 0) return nullptr;
  given().process = ::getpid();
  permit = std::shared_ptr<void>(&given(), [self = ::getpid()](void*) {
    if (::getpid() != self) return;
    const std::lock_guard<std::mutex> lock(given().mutex);
    if (!given().ours()) ::prctl(kSetPtracer, 0, 0, 0, 0);  // else another group has it by now
  });
  given().permit = permit;
  return permit;
}

}  // namespace permit

}  // namespace pycomm::cma
