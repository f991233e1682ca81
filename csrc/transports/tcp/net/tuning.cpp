// Options of TCP connections, none of which needs a privilege. The kernel may forbid some
// congestion controls.
#include "transports/tcp/net/tuning.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>

#include "core/error.h"
#include "transports/fd.h"
#include "transports/tcp/net/socket.h"

namespace pycomm::tcp {
namespace {

// Microseconds. The kernel doubles the small buffer: this much in a round trip of 100 us is
// 20 Gbit/s on each socket.
constexpr uint32_t kShortWay = 100;
constexpr int kSmallBuffer = 128 << 10;
// From this round trip on, a window that opens slowly costs more than its memory.
constexpr uint32_t kLongWay = 1000;
constexpr int kLargest = 1 << 30;  // the kernel takes the largest that the system allows
constexpr int kFarUnsent = 1 << 20;

// On one of several paths: one frame while another is sent, and the most.
constexpr uint64_t kLeastUnsent = 128 << 10, kMostUnsent = 4 << 20;
constexpr uint64_t kFirstUnsent = 256 << 10;
constexpr uint64_t kUnsentParts = 25;  // of what the path delivers in a second: 40 ms

// Zeros if the connection is broken.
tcp_info look(int fd) {
  tcp_info info = {};
  socklen_t size = sizeof info;
  return ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 ? info : tcp_info{};
}

// The least of the round trip's samples; an old kernel does not know it.
uint32_t shortest(const tcp_info& info) {
  return info.tcpi_min_rtt > 0 ? info.tcpi_min_rtt : info.tcpi_rtt;
}

void set(int fd, int level, int option, int value) {
  ::setsockopt(fd, level, option, &value, sizeof value);
}

// True if a send buffer of a fixed size may be larger than the one that the kernel adjusts.
bool has_larger_fixed_send_buffer() {
  std::ifstream file("/proc/sys/net/ipv4/tcp_wmem");
  int least = 0, first = 0, most = 0;
  const Fd probe(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!(file >> least >> first >> most) || !probe) return false;
  set(probe.get(), SOL_SOCKET, SO_SNDBUF, kLargest);
  int fixed = 0;
  socklen_t size = sizeof fixed;
  return ::getsockopt(probe.get(), SOL_SOCKET, SO_SNDBUF, &fixed, &size) == 0 && fixed > most;
}

}  // namespace

void choose_buffers(int fd, bool several_paths) {
  const tcp_info info = look(fd);
  if (several_paths) set(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, kFirstUnsent);
  // The minimum is used because other samples include the time until a thread answers. 0: an old
  // kernel.
  if (info.tcpi_min_rtt == 0) return;
  if (info.tcpi_min_rtt <= kShortWay && !several_paths) {
    set(fd, SOL_SOCKET, SO_SNDBUF, kSmallBuffer);
  } else if (info.tcpi_min_rtt >= kLongWay) {
    // For a reader that waits for so many bytes the kernel makes room for them, and keeps it. An
    // SO_RCVBUF would end the kernel's own adjustment, and stop at rmem_max, which is small.
    set(fd, SOL_SOCKET, SO_RCVLOWAT, kLargest);
    set(fd, SOL_SOCKET, SO_RCVLOWAT, 1);
    static const bool fixed_is_larger = has_larger_fixed_send_buffer();
    if (fixed_is_larger) set(fd, SOL_SOCKET, SO_SNDBUF, kLargest);
    if (!several_paths) set(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, kFarUnsent);
  }
}

void limit_unsent(int fd) {
  const tcp_info info = look(fd);
  if (info.tcpi_delivery_rate == 0) return;
  set(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT,
      static_cast<int>(
          std::clamp<uint64_t>(info.tcpi_delivery_rate / kUnsentParts, kLeastUnsent, kMostUnsent)));
}

LinkUse link_use(int fd) {
  const tcp_info info = look(fd);
  // While the other end's buffer is full, the link is not the bottleneck.
  return {info.tcpi_bytes_acked, info.tcpi_busy_time - info.tcpi_rwnd_limited};
}

std::chrono::milliseconds round_trip(int fd) {
  const std::chrono::microseconds measured(look(fd).tcpi_rtt);
  return std::chrono::duration_cast<std::chrono::milliseconds>(measured);
}

// Other samples include the time until a busy host answers.
std::chrono::microseconds least_round_trip(int fd) {
  return std::chrono::microseconds(shortest(look(fd)));
}

bool is_silent(int fd) {
  const tcp_info info = look(fd);
  return info.tcpi_unacked > 0 && info.tcpi_retransmits >= 2;
}

namespace {

constexpr char kAuto[] = "auto", kBbr[] = "bbr";
constexpr char kAllowed[] = "/proc/sys/net/ipv4/tcp_allowed_congestion_control";
// From this round trip on, what a sender does after a loss or a pause counts.
constexpr uint32_t kFarMicroseconds = 1000;
constexpr size_t kLongestName = 15;  // TCP_CA_NAME_MAX without its zero

bool set(int fd, const std::string& name) {
  return ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(),
                      static_cast<socklen_t>(name.size())) == 0;
}

std::string allowed() {
  std::string names;
  std::ifstream file(kAllowed);
  std::getline(file, names);
  return names.empty() ? "see " + std::string(kAllowed) : "it allows " + names;
}

}  // namespace

void check_congestion_control(const std::string& wanted) {
  if (wanted == kAuto) return;
  const auto refuse = [&](const std::string& why) {
    throw Error("tcp: the kernel refuses the congestion control \"" + wanted + "\" (" + why +
                "); set PYCOMM_CONGESTION to auto or to one that it lets this process use (" +
                allowed() + ")");
  };
  if (wanted.empty() || wanted.size() > kLongestName) refuse("there is no such name");
  const Fd probe(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (probe && !set(probe.get(), wanted)) refuse(error_text(errno));
}

bool gives_bbr(const std::string& wanted) {
  if (wanted != kAuto) return wanted == kBbr;
  const Fd probe(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return probe && set(probe.get(), kBbr);
}

void choose_congestion_control(int fd, const std::string& wanted) {
  if (wanted != kAuto) {
    set(fd, wanted);
  } else if (Address::local(fd).ip() == Address::remote(fd).ip()) {
    set(fd, "reno");
  } else if (shortest(look(fd)) >= kFarMicroseconds) {
    set(fd, kBbr);
  }
}

std::string congestion_control(int fd) {
  char name[kLongestName + 1] = {};
  socklen_t size = kLongestName;
  ::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &size);
  return name;
}

}  // namespace pycomm::tcp
