// How a mesh comes together: roll call, then the transports.
#include <algorithm>

#include "collectives/attendance.h"
#include "collectives/mesh.h"
#include "core/env.h"
#include "transports/meeting.h"
#include "transports/tcp_handshake.h"
#include "transports/window.h"

namespace pycomm {
namespace {

// How a wait grows patient: spins look at once, then so many looks yield, then it sleeps.
constexpr int kYields = 32;

// Everything that must be equal on all ranks before a byte can travel.
std::string hello(const Rendezvous& meeting, const CommunicatorOptions& options) {
  std::string text = "wire=" + std::to_string(tcp::kWireVersion) +
                     " size=" + std::to_string(meeting.size) + " transport=" + options.transport +
                     " algo=" + options.algo + " check=" + options.check +
                     " segment_bytes=" + std::to_string(options.segment_bytes);
  if (options.transport == "tcp" || options.transport == "auto") {
    text += " sockets=" + std::to_string(options.sockets) + " tls=" + (options.tls ? "on" : "off");
  }
  if (options.nodes.empty()) return text;
  text += " nodes=";
  for (const int node : options.nodes) text += std::to_string(node) + ",";
  text.pop_back();
  return text;
}

// The ranks that may share memory with ours: all, or those that a test declares.
std::vector<int> near(const Rendezvous& meeting, const std::vector<int>& nodes) {
  if (nodes.empty()) return all_ranks(meeting);
  if (static_cast<int>(nodes.size()) != meeting.size) {
    throw Error(std::to_string(nodes.size()) + " nodes are declared for " +
                std::to_string(meeting.size) + " ranks; declare one for each rank");
  }
  std::vector<int> ranks;
  for (int r = 0; r < meeting.size; r++) {
    if (nodes[r] == nodes[meeting.rank]) ranks.push_back(r);
  }
  return ranks;
}

// Every rank says that it is here and what it expects. Done before any transport starts, so that an
// absent rank is named and nobody speaks to a rank that would not understand.
void roll_call(const Rendezvous& meeting, const CommunicatorOptions& options,
               Attendance& attendance) {
  const std::string ours = hello(meeting, options);
  const std::vector<std::string> words =
      exchange(meeting, Attendance::kTopic, all_ranks(meeting), attendance.word(ours));
  for (int r = 0; r < meeting.size; r++) {
    const std::string theirs = attendance.came(r, words[static_cast<size_t>(r)]);
    if (theirs == ours) continue;
    throw WireMismatch("rank " + std::to_string(meeting.rank) + " has the options \"" + ours +
                       "\", rank " + std::to_string(r) + " has \"" + theirs +
                       "\"; start all ranks with the same options");
  }
}

}  // namespace

std::string join(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); i++) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

Mesh::Mesh(Rendezvous meeting, const CommunicatorOptions& options, Failure& failure)
    : rank_(meeting.rank), size_(meeting.size), failure_(failure), by_rank_(size_, nullptr) {
  for (auto& links : links_) links.resize(size_);
  topology_ = Topology(std::vector<int>(size_, 0));
  if (size_ == 1) return;

  Attendance attendance(meeting, options);
  meeting.look_out = [&attendance] { attendance.look_out(); };
  try {
    meet(meeting, options, attendance);
    attendance.leave();
  } catch (...) {
    attendance.give_up(std::current_exception());
  }
}

void Mesh::meet(const Rendezvous& meeting, const CommunicatorOptions& options,
                Attendance& attendance) {
  roll_call(meeting, options, attendance);
  const std::string& wanted = options.transport;
  const auto add = [&](std::unique_ptr<Transport> transport) {
    if (!transport) return;
    for (int r = 0; r < size_; r++) {
      if (r != rank_ && !by_rank_[r] && transport->reaches(r)) by_rank_[r] = transport.get();
    }
    if (!window_) window_ = transport->window();
    if (SharedStanding* shared = transport->standing()) standing_ = shared;
    transports_.push_back(std::move(transport));
  };
  const auto unreached = [&] {
    std::vector<int> ranks;
    for (int r = 0; r < size_; r++) {
      if (r != rank_ && !by_rank_[r]) ranks.push_back(r);
    }
    return ranks;
  };

  const std::vector<int> candidates = near(meeting, options.nodes);
  if (candidates.size() > 1) {
    if (wanted == "local") add(make_local(meeting, candidates));
    if (wanted == "shm" || wanted == "auto") add(make_shm(meeting, candidates));
  }
  const bool mixed = wanted == "auto" || candidates.size() < static_cast<size_t>(size_);
  if (wanted == "tcp" || (mixed && !unreached().empty())) {
    TcpOptions tcp;
    tcp.sockets = options.sockets;
    tcp.interface = options.interface;
    tcp.link_bytes_per_second = options.link_bytes_per_second;
    tcp.secret = options.secret;
    tcp.tls = options.tls;
    tcp.checks = payload_check(options.checksum);
    tcp.standing = standing_;
    add(make_tcp(meeting, unreached(), tcp));
  }
  // A single transport knows how many ranks share the cores, and looks for itself before it sleeps.
  const bool alone = transports_.size() == 1;
  spins_ = std::max(env().spin, 0);
  yields_ = alone && env().spin < 0 ? 0 : kYields;
  const std::vector<int> lost = unreached();
  if (!lost.empty()) {
    throw Error("rank " + std::to_string(rank_) + ": transport \"" + wanted + "\" does not reach " +
                join(lost) + "; use transport \"auto\"");
  }
  if (wanted == "tcp") {
    topology_ = Topology(all_ranks(meeting));
  } else if (!window_ || window_->size() < size_) {
    topology_ = agree_on_topology(meeting, window_ ? window_->member(0) : rank_);
  }
  for (const auto& transport : transports_) {
    if (transport->name() == "tcp") slowest_ = Medium::tcp;
  }
}

}  // namespace pycomm
