// A network with delay and loss between network namespaces, in user space: one TUN device in each,
// and this process moves the packets. For kernels without netem, and alike on those that have it.
//
// Standard input says everything, a line each. Until "go":
//   node PID IPV4                    a namespace, held open by this process, and its address
//   link I J DELAY LOSS              from node I to J: microseconds, a share
// and at any time:
//   rate I SENT RECEIVED             of a node, in bit/s (0: any)
//   mark                             counts of trips begin anew
//   trips                            prints the longest chain of one-way trips since the mark
//   packets                          prints how many were delivered, lost, and dropped by full
//   queues
// Its end closes the devices. Answers are lines on standard output; the first is "ready".
//
// A packet waits for the sender's rate, travels, and waits for the receiver's rate. Each of these
// queues drops what would wait for longer than 50 ms.
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr int64_t kQueue = 50'000'000;  // nanoseconds that a packet may wait for a rate
constexpr int kFraming = 14;            // bytes of Ethernet that tbf counts with each packet
constexpr int64_t kSpin = 60'000;       // a sleep is not worth less than this many nanoseconds
constexpr int kBatch = 64;

int64_t now() {
  timespec t;
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "%s: %s\n", what.c_str(), std::strerror(errno));
  std::exit(2);
}

struct Packet {
  int64_t at = 0;  // when it arrives at the receiver's link, then when it is delivered
  uint64_t number = 0;
  uint32_t epoch = 0, trips = 0;
  int size = 0;
  std::array<char, 65536>* bytes = nullptr;
};

struct Later {
  bool operator()(const Packet& a, const Packet& b) const {
    return a.at != b.at ? a.at > b.at : a.number > b.number;
  }
};

// Bytes that a rate lets through, one packet after the other.
struct Pipe {
  double ns_per_byte = 0;
  int64_t free_at = 0;

  // Returns when the packet has passed, or -1 if the queue is full.
  int64_t pass(int64_t when, int size) {
    const int64_t start = std::max(when, free_at);
    if (ns_per_byte == 0) return start;
    if (start - when > kQueue) return -1;
    free_at = start + static_cast<int64_t>((size + kFraming) * ns_per_byte);
    return free_at;
  }
  void set_rate(double bits) { ns_per_byte = bits > 0 ? 8e9 / bits : 0; }
};

struct Link {
  int64_t delay = 0;  // nanoseconds
  double loss = 0;
};

struct Node {
  int fd = -1;
  uint32_t address = 0;
  Pipe sent, received;
  std::priority_queue<Packet, std::vector<Packet>, Later> travelling;
  std::deque<Packet> arriving;
  uint32_t trips = 0;
};

int open_device(const std::string& pid) {
  const int space = ::open(("/proc/" + pid + "/ns/net").c_str(), O_RDONLY | O_CLOEXEC);
  if (space < 0 || ::setns(space, CLONE_NEWNET) != 0) fail("cannot enter a network namespace");
  ::close(space);
  const int fd = ::open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) fail("cannot open /dev/net/tun");
  ifreq request = {};
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  std::strcpy(request.ifr_name, "eth0");
  if (::ioctl(fd, TUNSETIFF, &request) != 0) fail("cannot make a TUN device");
  return fd;
}

class Network {
 public:
  void command(const std::string& line) {
    std::istringstream words(line);
    std::string verb;
    words >> verb;
    size_t i = 0, j = 0;
    if (verb == "node") {
      std::string pid, address;
      words >> pid >> address;
      nodes_.emplace_back();
      nodes_.back().fd = open_device(pid);
      ::inet_pton(AF_INET, address.c_str(), &nodes_.back().address);
      by_address_[nodes_.back().address] = nodes_.size() - 1;
    } else if (verb == "link") {
      double delay = 0;
      Link link;
      words >> i >> j >> delay >> link.loss;
      link.delay = static_cast<int64_t>(delay * 1e3);
      links_[{i, j}] = link;
    } else if (verb == "rate") {
      double sent = 0, received = 0;
      words >> i >> sent >> received;
      nodes_.at(i).sent.set_rate(sent);
      nodes_.at(i).received.set_rate(received);
    } else if (verb == "mark") {
      epoch_++;
      for (Node& node : nodes_) node.trips = 0;
      std::puts("marked");
    } else if (verb == "trips") {
      uint32_t most = 0;
      for (const Node& node : nodes_) most = std::max(most, node.trips);
      std::printf("%u\n", most);
    } else if (verb == "packets") {
      for (size_t node = 0; node < nodes_.size(); node++) {
        while (take(node)) {  // all that was sent before the question
        }
      }
      std::printf("%lu %lu %lu\n", delivered_, lost_, dropped_);
    } else if (verb == "go") {
      std::puts("ready");
    }
    std::fflush(stdout);
  }

  // Moves what is due. Returns when to look again, at the latest.
  int64_t turn() {
    bool any = false;
    for (size_t i = 0; i < nodes_.size(); i++) any |= take(i);
    int64_t next = INT64_MAX;
    for (Node& node : nodes_) next = std::min(next, deliver(node));
    return any ? 0 : next;
  }

  std::vector<pollfd> polls() const {
    std::vector<pollfd> result = {{0, POLLIN, 0}};
    for (const Node& node : nodes_) result.push_back({node.fd, POLLIN, 0});
    return result;
  }

 private:
  bool take(size_t from) {
    Node& node = nodes_[from];
    for (int k = 0; k < kBatch; k++) {
      auto* bytes = buffer();
      const ssize_t size = ::read(node.fd, bytes->data(), bytes->size());
      if (size < 20) {
        free_.push_back(bytes);
        if (size <= 0) return k > 0;
        continue;
      }
      uint32_t address = 0;
      std::memcpy(&address, bytes->data() + 16, 4);
      const auto to = by_address_.find(address);
      Packet packet;
      packet.bytes = bytes;
      packet.size = static_cast<int>(size);
      if ((bytes->at(0) >> 4) != 4 || to == by_address_.end() || !send(from, to->second, packet)) {
        free_.push_back(bytes);
      }
    }
    return true;
  }

  bool send(size_t from, size_t to, Packet& packet) {
    Node& node = nodes_[from];
    const Link& link = links_[{from, to}];
    const int64_t left = node.sent.pass(now(), packet.size);
    if (left < 0) return dropped_++, false;
    if (chance() < link.loss) return lost_++, false;
    packet.at = left + link.delay;
    packet.number = number_++;
    packet.epoch = epoch_;
    packet.trips = node.trips + 1;
    nodes_[to].travelling.push(packet);
    return true;
  }

  int64_t deliver(Node& node) {
    const int64_t time = now();
    while (!node.travelling.empty() && node.travelling.top().at <= time) {
      Packet packet = node.travelling.top();
      node.travelling.pop();
      packet.at = node.received.pass(packet.at, packet.size);
      if (packet.at < 0) {
        dropped_++;
        free_.push_back(packet.bytes);
      } else {
        node.arriving.push_back(packet);
      }
    }
    while (!node.arriving.empty() && node.arriving.front().at <= time) {
      const Packet packet = node.arriving.front();
      node.arriving.pop_front();
      if (packet.epoch == epoch_) node.trips = std::max(node.trips, packet.trips);
      if (::write(node.fd, packet.bytes->data(), static_cast<size_t>(packet.size)) < 0) {
        dropped_++;
      } else {
        delivered_++;
      }
      free_.push_back(packet.bytes);
    }
    int64_t next = INT64_MAX;
    if (!node.travelling.empty()) next = node.travelling.top().at;
    if (!node.arriving.empty()) next = std::min(next, node.arriving.front().at);
    return next;
  }

  std::array<char, 65536>* buffer() {
    if (free_.empty()) return new std::array<char, 65536>;
    auto* bytes = free_.back();
    free_.pop_back();
    return bytes;
  }

  double chance() { return uniform_(random_); }

  std::deque<Node> nodes_;
  std::map<uint32_t, size_t> by_address_;
  std::map<std::pair<size_t, size_t>, Link> links_;
  std::vector<std::array<char, 65536>*> free_;
  uint64_t number_ = 0, delivered_ = 0, lost_ = 0, dropped_ = 0;
  uint32_t epoch_ = 0;
  std::mt19937_64 random_{7};  // the same losses in every run of the same packets
  std::uniform_real_distribution<double> uniform_{0, 1};
};

}  // namespace

int main() {
  // Packets should leave on time, whatever else runs on this machine. Without the right to it (in a
  // user namespace) the rates are those that a busy machine has. Under a real-time priority a rank
  // on the same core waited for up to a second: the scheduler moved it to no other, since the
  // processes that keep the cores busy (bench/lab/busy_cores.py) run there. In a session of its own
  // it waited for seconds: priorities count within a session only where the kernel schedules
  // sessions as groups (sched_autogroup). A process group of its own is enough to survive Ctrl-C.
  ::setpriority(PRIO_PROCESS, 0, -20);
  ::setpgid(0, 0);
  Network network;
  std::string input;
  for (;;) {
    const int64_t next = network.turn();
    auto polls = network.polls();
    const int64_t pause = next == INT64_MAX ? 1'000'000'000 : next - now();
    const int64_t sleep = pause < kSpin ? 0 : pause;
    const timespec limit = {sleep / 1'000'000'000, sleep % 1'000'000'000};
    ::ppoll(polls.data(), polls.size(), &limit, nullptr);
    if (polls[0].revents == 0) continue;
    char part[4096];
    const ssize_t n = ::read(0, part, sizeof part);
    if (n <= 0) return 0;
    input.append(part, static_cast<size_t>(n));
    for (size_t end; (end = input.find('\n')) != std::string::npos; input.erase(0, end + 1)) {
      network.command(input.substr(0, end));
    }
  }
}
