#include "collectives/group/channel_mesh.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <thread>

#include "collectives/group/membership.h"
#include "core/decimal.h"
#include "core/env.h"
#include "transports/openssl.h"
#include "transports/shm/window.h"
#include "transports/tcp/connect/handshake.h"
#include "transports/tcp/transport.h"

namespace pycomm {
namespace {

// A sleep ends early when bytes arrive; this limit bounds how late an abort from another thread is
// seen.
constexpr std::chrono::microseconds kIdleLimit{2000};
// Where a wait involves two kinds of transport, only one can be slept on. The other is polled after
// 50 us, then at growing intervals.
constexpr std::chrono::microseconds kShortIdle{50};
constexpr int kIdleDoublings = 4;
// Steps of a spin between two checks for failures: one check costs as much as several polls.
constexpr int kPollsPerCheck = 64;
// About a second, on whatever clock: one update costs a microsecond for each socket.
constexpr uint64_t kTicksBetweenLinks = 2'000'000'000;
// Limit of the time that an error waits for the states of other ranks. Ranks that wait answer
// within a few milliseconds and a round trip; ranks that compute do not.
constexpr Milliseconds kSurvey{200};
constexpr Milliseconds kSurveyStep{2};
// Stages of a wait: so many polls yield, then it sleeps.
constexpr int kYields = 32;

std::string numbers(const std::vector<int>& list) {
  std::string text;
  for (const int number : list) text += (text.empty() ? "" : ",") + std::to_string(number);
  return text;
}

// Returns "0.1.0 (wire 8)" of a compatibility_text(); else what it begins with.
std::string build_of(const std::string& text) {
  const std::string build = text.substr(0, text.find(" size="));
  const std::string before = "pycomm=", between = " wire=";
  const size_t at = build.find(between);
  if (build.compare(0, before.size(), before) != 0 || at == std::string::npos) return build;
  return build.substr(before.size(), at - before.size()) + " (wire " +
         build.substr(at + between.size()) + ")";
}

// Returns everything that must be equal on all ranks before a byte can travel.
std::string compatibility_text(const Rendezvous& rendezvous, const CommunicatorOptions& options) {
  std::string text = "pycomm=" PYCOMM_VERSION " wire=" + std::to_string(tcp::kWireVersion) +
                     " size=" + std::to_string(rendezvous.size) +
                     " transport=" + options.transport + " algo=" + options.algo +
                     " segment_bytes=" + std::to_string(options.segment_bytes);
  if (options.transport != "shm") {
    text += " sockets=" + (options.sockets == 0 ? "auto" : std::to_string(options.sockets)) +
            " tls=" + (encrypts(options) ? "on" : "off");
  }
  if (!options.sites.empty()) text += " sites=" + numbers(options.sites);
  if (options.nodes.empty()) return text;
  return text + " nodes=" + numbers(options.nodes);
}

// Returns the ranks that may share memory with this one: all, or those that a test declares.
std::vector<int> near(const Rendezvous& rendezvous, const std::vector<int>& nodes) {
  if (nodes.empty()) return all_ranks(rendezvous);
  if (static_cast<int>(nodes.size()) != rendezvous.size) {
    throw Error(std::to_string(nodes.size()) + " nodes are declared for " +
                std::to_string(rendezvous.size) + " ranks; declare one for each rank");
  }
  std::vector<int> ranks;
  for (int r = 0; r < rendezvous.size; r++) {
    if (nodes[r] == nodes[rendezvous.rank]) ranks.push_back(r);
  }
  return ranks;
}

constexpr char kNodeTopic[] = "node";

// Agrees on the topology: every rank publishes the lowest rank of its node.
Topology agree_on_topology(const Rendezvous& rendezvous, int lowest) {
  const std::vector<std::string> words =
      all_gather_values(rendezvous, kNodeTopic, all_ranks(rendezvous), std::to_string(lowest));
  std::vector<int> first;
  for (size_t r = 0; r < words.size(); r++) {
    std::string_view rest = words[r];
    double lowest = -1;
    const bool number = take_decimal(rest, lowest) && rest.empty();
    const int rank = static_cast<int>(r);
    const bool known = number && lowest >= 0 && lowest <= rank;
    first.push_back(known ? static_cast<int>(lowest) : rank);
    if (known && first[static_cast<size_t>(first.back())] == first.back()) continue;
    throw Error("rank " + std::to_string(rendezvous.rank) + ": rank " + std::to_string(rank) +
                " says that the first rank of its node is \"" + words[r].substr(0, 40) +
                "\", which is no such rank; install the same pycomm on all ranks");
  }
  return Topology(first);
}

constexpr char kLinkTopic[] = "link";
// A store that answers in less than this is on our host or the next one. Of two ranks that are a
// millisecond from each other, one is half of that or more from the store.
constexpr std::chrono::microseconds kNearStore(500);
// In larger groups round trips are not exchanged: n * n of them would be.
constexpr int kMostRoundTrips = 256;

// Returns what this rank publishes of its link: "sends receives", in bytes per second, and whether
// it is far from the store.
std::string link_value(const Rendezvous& rendezvous, const CommunicatorOptions& options) {
  const LinkRate rate = parse_link_rate(options.link);
  const bool far = rendezvous.store->round_trip() >= kNearStore;
  return decimal_text(rate.send) + " " + decimal_text(rate.receive) + (far ? " far" : " near");
}

Links declared_links(const std::vector<std::string>& values, bool& far) {
  std::vector<LinkRate> rates(values.size());
  for (size_t r = 0; r < values.size(); r++) {
    std::string_view rest = values[r];
    for (double* rate : {&rates[r].send, &rates[r].receive}) {
      if (!take_decimal(rest, *rate) || !std::isfinite(*rate) || *rate < 0) {
        throw Error("rank " + std::to_string(r) + " says \"" + values[r].substr(0, 40) +
                    "\" instead of the rates of its link; install the same pycomm on all ranks");
      }
      rest.remove_prefix(std::min<size_t>(1, rest.size()));  // the space behind it
    }
    far = far || rest == "far";
  }
  return Links(rates);
}

// Every rank publishes that it is here and what it expects. This is done before any transport
// starts, so that an absent rank is named and no rank sends to one that would not understand.
void bootstrap(const Rendezvous& rendezvous, const CommunicatorOptions& options,
               Membership& membership, ShmSetup& shm, TcpSetup& tcp) {
  const std::string ours = compatibility_text(rendezvous, options);
  if (options.transport != "tcp") shm.announce(rendezvous);
  if (options.transport != "shm") {
    tcp.announce(rendezvous, !options.parent || options.parent->uses_network());
  }
  announce(rendezvous, kLinkTopic, link_value(rendezvous, options));
  const std::vector<std::string> values = all_gather_values(
      rendezvous, Membership::kTopic, all_ranks(rendezvous), membership.first_value(ours));
  for (int r = 0; r < rendezvous.size; r++) {
    const std::string theirs = membership.add(r, values[static_cast<size_t>(r)]);
    if (theirs == ours) continue;
    if (build_of(theirs) != build_of(ours)) {
      throw WireMismatch("rank " + std::to_string(rendezvous.rank) + " runs pycomm " +
                         build_of(ours) + ", rank " + std::to_string(r) + " runs " +
                         build_of(theirs).substr(0, 40) +
                         "; install the same version on all hosts");
    }
    throw WireMismatch("rank " + std::to_string(rendezvous.rank) + " has the options \"" + ours +
                       "\", rank " + std::to_string(r) + " has \"" + theirs +
                       "\"; start all ranks with the same options");
  }
}

}  // namespace

ChannelMesh::ChannelMesh(Rendezvous rendezvous, const CommunicatorOptions& options,
                         Failure& failure)
    : rank_(rendezvous.rank), size_(rendezvous.size), failure_(failure), by_rank_(size_, nullptr) {
  for (auto& links : links_) links.resize(size_);
  topology_ = Topology(std::vector<int>(size_, 0));
  if (size_ == 1) return;

  Membership membership(rendezvous, options);
  rendezvous.interrupt_check = [&membership] { membership.interrupt_check(); };
  try {
    connect(rendezvous, options, membership);
    membership.leave();
    // What was given to all ranks is not in the store; else who reads it later could join.
    const bool by_tcp = std::any_of(transports_.begin(), transports_.end(),
                                    [](const auto& each) { return each->name() == "tcp"; });
    if (by_tcp && options.secret.empty()) {
      forget(rendezvous, {Membership::kTopic, tcp::kCardTopic});
    }
  } catch (...) {
    membership.give_up(std::current_exception());
  }
}

void ChannelMesh::connect(const Rendezvous& rendezvous, const CommunicatorOptions& options,
                          Membership& membership) {
  ShmSetup shm;
  TcpSetup tcp(options);
  bootstrap(rendezvous, options, membership, shm, tcp);
  const std::vector<std::string> links =
      all_gather_values(rendezvous, kLinkTopic, all_ranks(rendezvous), "");  // announced
  links_between_ = declared_links(links, may_be_far_);
  const std::string& wanted = options.transport;
  const auto add = [&](std::unique_ptr<Transport> transport) {
    if (!transport) return;
    for (int r = 0; r < size_; r++) {
      if (r != rank_ && !by_rank_[r] && transport->reaches(r)) by_rank_[r] = transport.get();
    }
    transports_.push_back(std::move(transport));
  };
  const auto unreached = [&] {
    std::vector<int> ranks;
    for (int r = 0; r < size_; r++) {
      if (r != rank_ && !by_rank_[r]) ranks.push_back(r);
    }
    return ranks;
  };

  const std::vector<int> candidates = near(rendezvous, options.nodes);
  if (candidates.size() > 1 && wanted != "tcp") {
    std::unique_ptr<ShmTransport> shared = shm.make(rendezvous, candidates);
    shared_ = shared.get();
    add(std::move(shared));
  }
  if (shared_) {
    window_ = shared_->window();
    rank_state_ = shared_->rank_state();
  }
  const bool mixed = wanted == "auto" || candidates.size() < static_cast<size_t>(size_);
  const bool one_node = window_ && window_->size() == size_;
  const int lowest = window_ ? window_->member(0) : rank_;
  const bool alone_on_hosts = wanted == "tcp" || hosts_differ(rendezvous);
  if (!alone_on_hosts && !one_node) announce(rendezvous, kNodeTopic, std::to_string(lowest));
  if (wanted == "tcp" || (mixed && !unreached().empty())) {
    add(tcp.make(rendezvous, unreached(), rank_state_));
  }
  // A single transport knows how many ranks share the cores, and polls by itself before it sleeps.
  const bool alone = transports_.size() == 1;
  yields_ = alone ? 0 : kYields;
  const std::vector<int> lost = unreached();
  if (!lost.empty()) {
    throw Error("rank " + std::to_string(rank_) + ": transport \"" + wanted + "\" does not reach " +
                rank_list(lost) + "; use transport \"auto\"");
  }
  if (alone_on_hosts) {
    topology_ = Topology(all_ranks(rendezvous));
  } else if (!one_node) {
    topology_ = agree_on_topology(rendezvous, lowest);
  }
  for (const auto& transport : transports_) {
    if (transport->name() == "tcp") slowest_ = Medium::tcp;
  }
  if (!options.sites.empty()) {
    if (static_cast<int>(options.sites.size()) != size_) {
      throw Error(std::to_string(options.sites.size()) + " sites are declared for " +
                  std::to_string(size_) + " ranks; declare one for each rank");
    }
    std::vector<int> first;
    for (const int site : options.sites) {
      const auto found = std::find(options.sites.begin(), options.sites.end(), site);
      first.push_back(static_cast<int>(found - options.sites.begin()));
    }
    use_sites(first);
  }
  may_be_far_ = may_be_far_ && topology_.nodes() > 1 && size_ <= kMostRoundTrips;
}

std::string ChannelMesh::describe() const {
  std::string text = size_ == 1 ? "1 rank" : std::to_string(size_) + " ranks";
  for (size_t i = 0; i < transports_.size(); i++) {
    text += (i == 0 ? ": " : "; ") + transports_[i]->describe();
  }
  std::lock_guard<std::mutex> lock(learning_);
  const std::string links = links_between_.describe();
  if (!links.empty()) text += "; " + links;
  if (!has_sites_) return text;
  text += "; " + std::to_string(topology_.nodes()) + " sites: ";
  for (int k = 0; k < topology_.nodes(); k++) {
    for (const int rank : topology_.node(k)) {
      text +=
          (rank == topology_.node(k).front() ? k == 0 ? "" : " | " : ",") + std::to_string(rank);
    }
  }
  return text;
}

std::vector<std::string> ChannelMesh::transports() const {
  std::vector<std::string> names;
  for (const auto& transport : transports_) names.emplace_back(transport->name());
  return names;
}

void ChannelMesh::use_sites(const std::vector<int>& first) {
  const Topology sites(first);
  if (sites.ranks() == size_ && sites.nodes() > 1 && sites.nodes() < topology_.nodes()) {
    has_sites_ = true;
    topology_ = sites;
  }
}

uint32_t ChannelMesh::round_trip(int rank) const {
  const Transport* transport = by_rank_[rank];
  return transport ? static_cast<uint32_t>(transport->round_trip(rank).count()) : 0;
}

void ChannelMesh::set_round_trips(std::vector<uint32_t> round_trips) {
  std::lock_guard<std::mutex> lock(learning_);
  links_between_.set_round_trips(std::move(round_trips));
  use_sites(links_between_.sites());
}

std::string ChannelMesh::take_back_heap() noexcept {
  const auto heap = this->heap();
  if (!window_ || !heap) return "";
  const std::string problem = heap->take_back(window_->written_late());
  if (problem.empty()) return "";
  return "; the memory of Communicator.allocate could not be taken from the other ranks (" +
         problem + "): one that was stopped may still write to the buffer of this call";
}

uint64_t ChannelMesh::sent_bytes() const {
  uint64_t sum = 0;
  for (const auto& transport : transports_) sum += transport->sent_bytes();
  return sum;
}

uint64_t ChannelMesh::wire_bytes() const {
  uint64_t sum = 0;
  for (const auto& transport : transports_) {
    if (transport->name() == "tcp") sum += transport->sent_bytes();
  }
  return sum;
}

Channel& ChannelMesh::open(Lane lane, int peer) {
  Link& l = link(lane, peer);
  if (!l.channel) {
    std::lock_guard<std::mutex> lock(opening_);
    l.channel = &by_rank_[peer]->channel(peer, lane);
    opened_[static_cast<int>(lane)].push_back(peer);
  }
  return *l.channel;
}

uint64_t ChannelMesh::send(Lane lane, int peer, const OpTag& tag, Span<const uint8_t> data) {
  Channel& channel = open(lane, peer);
  return link(lane, peer).last_send = channel.send(tag, data);
}

uint64_t ChannelMesh::recv(Lane lane, int peer, const OpTag& tag, Span<uint8_t> data) {
  Channel& channel = open(lane, peer);
  return link(lane, peer).last_recv = channel.recv(tag, data);
}

bool ChannelMesh::progress(Lane lane, int peer) {
  const Link& l = link(lane, peer);
  if (!l.pending() || !l.channel->progress()) return false;
  idles_[static_cast<int>(lane)] = 0;
  return true;
}

bool ChannelMesh::progress(Lane lane) {
  bool moved = false;
  for (const int peer : opened_[static_cast<int>(lane)]) moved |= progress(lane, peer);
  return moved;
}

bool ChannelMesh::pending(Lane lane) {
  const std::vector<int>& peers = opened_[static_cast<int>(lane)];
  return std::any_of(peers.begin(), peers.end(), [&](int peer) { return pending(lane, peer); });
}

void ChannelMesh::check(Lane lane) {
  failure_.rethrow();
  for (const auto& transport : transports_) {
    try {
      transport->check();
    } catch (const PeerLost& e) {
      if (e.rank < 0 || e.rank >= size_ || pending(lane, e.rank)) throw;
      if (!lost_ones(lane).empty()) throw;
    }
  }
}

std::vector<int> ChannelMesh::lost_ones(Lane lane) {
  std::vector<int> ranks;
  for (const int peer : opened_[static_cast<int>(lane)]) {
    if (pending(lane, peer) && lost(peer)) ranks.push_back(peer);
  }
  return ranks;
}

void ChannelMesh::idle(Lane lane, std::chrono::microseconds limit) {
  if (transports_.empty()) return;
  Transport* wanted = nullptr;
  bool both = false;
  for (const int peer : opened_[static_cast<int>(lane)]) {
    if (!pending(lane, peer)) continue;
    both = both || (wanted && wanted != by_rank_[peer]);
    wanted = by_rank_[peer];
  }
  int& idles = idles_[static_cast<int>(lane)];
  if (!both) {
    idles = 0;
    return (wanted ? wanted : transports_.back().get())->idle(lane, limit);
  }
  // The last one is TCP, where polling costs a system call.
  transports_.back()->idle(lane,
                           std::min(limit, kShortIdle * (1 << std::min(idles, kIdleDoublings))));
  idles++;
}

bool ChannelMesh::should_check(int quiet) const {
  return quiet >= yields_ || quiet % kPollsPerCheck == kPollsPerCheck - 1;
}

void ChannelMesh::pause(Lane lane, int quiet, const Deadline& deadline) {
  if (quiet < yields_) {
    sched_yield();
  } else {
    idle(lane, std::min<std::chrono::microseconds>(kIdleLimit, deadline.left()));
  }
}

void ChannelMesh::note_links(Trace& trace) {
  if (slowest_ != Medium::tcp) return;
  const uint64_t now = ticks();
  if (now - links_noted_ < kTicksBetweenLinks) return;
  links_noted_ = now;
  for (const int peer : opened_[static_cast<int>(Lane::collective)]) {
    trace.note_link(peer, link(Lane::collective, peer).channel->use());
  }
}

void ChannelMesh::begin(const OpTag& tag) {
  rank_state_->begin(tag);
  for (const int peer : opened_[static_cast<int>(Lane::collective)]) {
    Link& l = link(Lane::collective, peer);
    if (l.received() > l.began) l.heard = running_;
    l.began = l.received();
  }
  running_ = tag;
}

std::vector<int> ChannelMesh::missing(int source) {
  std::vector<int> silent, slow, full;
  for (const int peer : opened_[static_cast<int>(Lane::collective)]) {
    const Link& l = link(Lane::collective, peer);
    if (l.last_recv > l.received()) {
      (l.received() == l.began ? silent : slow).push_back(peer);
    } else if (l.pending()) {
      full.push_back(peer);
    }
  }
  if (std::count(silent.begin(), silent.end(), source)) return {source};
  return !silent.empty() ? silent : !slow.empty() ? slow : full;
}

PeerStatus ChannelMesh::look(Lane lane, int rank) {
  if (rank == rank_) return {PeerStatus::Liveness::here, rank_state_->load()};
  PeerStatus status = by_rank_[rank]->look(rank);
  if (status.liveness == PeerStatus::Liveness::silent && lane == Lane::collective) {
    const Link& l = link(lane, rank);
    status.rank_state = RankState();
    status.rank_state.call = l.received() > l.began ? running_ : l.heard;
  }
  return status;
}

std::vector<PeerStatus> ChannelMesh::survey(Lane lane, uint64_t all_inside) {
  using Liveness = PeerStatus::Liveness;
  for (const auto& transport : transports_) transport->ask();
  Milliseconds way(0);
  for (const auto& transport : transports_) way = std::max(way, transport->round_trip());
  const Deadline deadline = Deadline::after(kSurvey + 2 * way);
  std::vector<PeerStatus> ranks(size_);
  for (;;) {
    for (int r = 0; r < size_; r++) ranks[r] = look(lane, r);
    const bool settled = std::all_of(ranks.begin(), ranks.end(), [&](const PeerStatus& s) {
      return s.liveness == Liveness::here ? s.rank_state.call.seq >= all_inside
                                          : s.liveness != Liveness::silent;
    });
    if (settled || deadline.expired() || aborted()) return ranks;
    std::this_thread::sleep_for(kSurveyStep);
    // What they were doing when they answered may be over by now.
    if (all_inside > 0) {
      for (const auto& transport : transports_) transport->ask();
    }
  }
}

std::exception_ptr ChannelMesh::aborted() const {
  for (const auto& transport : transports_) {
    try {
      transport->check();
    } catch (const PeerLost&) {
      continue;
    } catch (const Error&) {
      return from_notice(std::current_exception());
    }
  }
  return nullptr;
}

bool ChannelMesh::lost(int rank) const {
  Transport* transport = by_rank_[rank];
  return transport && transport->look(rank).liveness == PeerStatus::Liveness::died;
}

void ChannelMesh::abort(const Notice& notice) noexcept {
  for (const auto& transport : transports_) transport->abort(notice);
}

}  // namespace pycomm
