// Congestion control by connection; the kernel has the algorithms, and may forbid some of them.
#include "transports/tcp/net/congestion.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <fstream>

#include "core/error.h"
#include "transports/tcp/net/socket.h"

namespace pycomm::tcp {
namespace {

constexpr char kAuto[] = "auto";
constexpr char kAllowed[] = "/proc/sys/net/ipv4/tcp_allowed_congestion_control";
// From this round trip on, what a sender does after a loss or a pause counts.
constexpr uint32_t kFarMicroseconds = 1000;
constexpr size_t kLongestName = 15;  // TCP_CA_NAME_MAX without its zero

bool set(int fd, const std::string& name) {
  return ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(),
                      static_cast<socklen_t>(name.size())) == 0;
}

// The least round trip is used: other samples include the time until a busy host answers.
bool is_far(int fd) {
  tcp_info info = {};
  socklen_t size = sizeof info;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
  return (info.tcpi_min_rtt > 0 ? info.tcpi_min_rtt : info.tcpi_rtt) >= kFarMicroseconds;
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

void choose_congestion_control(int fd, const std::string& wanted) {
  if (wanted != kAuto) {
    set(fd, wanted);
  } else if (Address::local(fd).ip() == Address::remote(fd).ip()) {
    set(fd, "reno");
  } else if (is_far(fd)) {
    set(fd, "bbr");
  }
}

std::string congestion_control(int fd) {
  char name[kLongestName + 1] = {};
  socklen_t size = kLongestName;
  ::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &size);
  return name;
}

}  // namespace pycomm::tcp
