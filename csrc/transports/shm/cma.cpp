#include "transports/shm/cma.h"

#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>

namespace pycomm::cma {

bool readable(const SharedRegion& region, int self) {
  const RankSlot& ours = region.rank_slot(self);
  for (int r = 0; r < region.ranks(); r++) {
    if (r == self) continue;
    const RankSlot& theirs = region.rank_slot(r);
    // In another PID namespace their process number may belong to another process.
    if (theirs.process[0] == ours.process[0] || theirs.process[1] != ours.process[1]) return false;
    // We read the process name in their rank slot at their address, and compare it with the known
    // one.
    uint64_t seen[2] = {};
    const auto* from = reinterpret_cast<const RankSlot*>(theirs.address)->process;
    if (read(static_cast<pid_t>(theirs.process[0]), from, seen, sizeof seen) != 0) return false;
    if (std::memcmp(seen, theirs.process, sizeof seen) != 0) return false;
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

}  // namespace pycomm::cma
