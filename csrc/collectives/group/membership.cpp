#include "collectives/group/membership.h"

#include <algorithm>
#include <optional>
#include <thread>

#include "collectives/group/failure.h"
#include "core/error.h"
#include "core/interrupt.h"
#include "core/notice.h"

namespace pycomm {

using std::chrono::duration_cast;

namespace {

// Until all have joined, only the published values of the ranks nearest to us are polled: they are
// likely on our host, and one witness is enough.
constexpr int kNear = 8;
// Time in which we search for the cause of an error of ours, or a multiple of the store's response
// time if that is longer. A rank that knows the cause publishes it before it closes.
constexpr Milliseconds kCauseSearch(100);
constexpr int kCauseSearchTurns = 4;
constexpr Milliseconds kPause(10);
// Share of a rank's time that interrupt checks may take: one part of five.
constexpr int kCheckShare = 4;
// Requests of a check to the store. Where it is far away, the first check comes so late that it
// does not delay ranks that arrive together.
constexpr int kRequests = 2;
// Name of the word by which a rank that gives up says why.
constexpr char kReason[] = "given up";

}  // namespace

Membership::Membership(const Rendezvous& rendezvous, const CommunicatorOptions& options)
    : rendezvous_(rendezvous),
      options_(options),
      next_look_(Deadline::after(std::max(
          rendezvous.poll_interval() / 2,
          duration_cast<Milliseconds>(kCheckShare * kRequests * rendezvous.store->round_trip())))) {
  if (!options.parent) return;
  if (options.parent_ranks.size() != static_cast<size_t>(rendezvous.size)) {
    throw Error(std::to_string(options.parent_ranks.size()) + " ranks of the parent group for " +
                std::to_string(rendezvous.size) + " ranks; name one for each");
  }
  for (const int rank : options.parent_ranks) {
    if (rank >= 0 && rank < options.parent->size()) continue;
    throw Error("rank " + std::to_string(rank) + " is not in the parent group of " +
                std::to_string(options.parent->size()));
  }
  parent_was_over_ = options.parent->over() != nullptr;
}

std::string Membership::first_value(const std::string& settings) const {
  return settings + "\n" + process_name();
}

std::string Membership::add(int rank, const std::string& value) {
  const size_t end = std::min(value.find('\n'), value.size());
  // Ranks that a test declares to be on another node cannot be seen.
  const auto& nodes = options_.nodes;
  const bool near = nodes.empty() || nodes[rank] == nodes[rendezvous_.rank];
  if (near && end < value.size()) processes_.emplace(rank, Process(value.substr(end + 1)));
  return value.substr(0, end);
}

void Membership::interrupt_check() {
  if (!next_look_.expired()) return;
  const auto start = Deadline::Clock::now();
  try {
    check_interrupt();
    try {
      if (options_.interrupt) options_.interrupt();
    } catch (const PeerLost& gone) {
      if (!has_met(gone.rank)) throw;
    }
    if (options_.parent && !parent_was_over_) {
      if (const std::exception_ptr error = options_.parent->over()) std::rethrow_exception(error);
    }
    look_for_deaths();
    look_at_store();
  } catch (...) {
    knows_ = true;
    throw;
  }
  // Where the store is far away, a rank that polls it makes no other progress meanwhile.
  const auto took = duration_cast<Milliseconds>(Deadline::Clock::now() - start);
  next_look_ = Deadline::after(std::max(rendezvous_.poll_interval() / 2, kCheckShare * took));
}

void Membership::look_for_deaths() {
  for (int r = 0; r < rendezvous_.size && options_.parent; r++) {
    if (r != rendezvous_.rank && options_.parent->lost(options_.parent_ranks[r]) && !has_met(r)) {
      throw_died(r, "the group that it is in already has lost it");
    }
  }
  for (const auto& [rank, process] : processes_) {
    if (!process.gone() || has_met(rank)) continue;
    // One that we have never seen here died before we started, or its machine is a clone of ours.
    throw_died(
        rank, "its process " + std::to_string(process.id()) + " is gone" +
                  (process.died() ? ""
                                  : "; if it runs on another machine that has the hostname of this "
                                    "one, set PYCOMM_HOST_ID on each of them"));
  }
}

void Membership::look_at_store() {
  const auto start = Deadline::Clock::now();
  const auto reason = find_word(rendezvous_, kReason);
  answers_in_ = duration_cast<Milliseconds>(Deadline::Clock::now() - start);
  if (reason) throw_reason(*reason);
  std::vector<int> unseen;
  const int last = std::min(rendezvous_.rank + kNear, rendezvous_.size - 1);
  for (int r = std::max(rendezvous_.rank - kNear, 0); r <= last; r++) {
    if (r != rendezvous_.rank && processes_.count(r) == 0) unseen.push_back(r);
  }
  if (unseen.empty()) return;
  // From another one each time, if there is time for few.
  std::rotate(unseen.begin(), unseen.begin() + looks_++ % unseen.size(), unseen.end());
  const auto ranks = all_ranks(rendezvous_);
  for (const auto& [rank, value] :
       published_values(rendezvous_, kTopic, ranks, unseen, rendezvous_.poll_interval() / 2)) {
    if (processes_.count(rank) == 0 && rank != rendezvous_.rank) add(rank, plain_value(value));
  }
}

void Membership::throw_reason(const std::string& reason) {
  knows_ = true;
  const Span<const uint8_t> bytes(reinterpret_cast<const uint8_t*>(reason.data()), reason.size());
  std::rethrow_exception(from_notice(std::make_exception_ptr(Aborted(
      Notice::decode(bytes), "has left the rendezvous of group \"" + rendezvous_.group + "\""))));
}

bool Membership::has_met(int rank) {
  try {
    return find_word(rendezvous_, word_name("met", rank)).has_value();
  } catch (const Error&) {  // the store died with it
    return false;
  }
}

void Membership::throw_died(int rank, const std::string& how) {
  // A rank that has given up says why before it ends, and may have ended since our last look.
  std::optional<std::string> reason;
  try {
    reason = find_word(rendezvous_, kReason);
  } catch (const Error&) {  // the store died with it
  }
  if (reason) throw_reason(*reason);
  knows_ = true;
  throw_error(lost(rank, "died while group \"" + rendezvous_.group + "\" was made: " + how +
                             " (seen by rank " + std::to_string(rendezvous_.rank) +
                             "); look at its own log"));
}

void Membership::leave() { set_word(rendezvous_, word_name("met", rendezvous_.rank), "yes"); }

std::exception_ptr Membership::behind(const std::exception_ptr& error) {
  // The others cannot connect to us from now on and search for the cause: our reason must be
  // published before they give up the search.
  if (knows_) return error;
  Deadline end = Deadline::after(Milliseconds(0));
  bool late = false;
  try {
    std::rethrow_exception(error);
  } catch (const WireMismatch&) {  // the mismatch that this rank saw is the cause
    return error;
  } catch (const Timeout&) {
    late = true;
  } catch (const Error&) {  // a refused connection or a lost store: the failed rank is not known
    end = Deadline::after(kCauseSearch);
  } catch (...) {  // a signal, no memory
    return error;
  }
  try {
    for (bool first = true;; first = false) {
      look_for_deaths();
      look_at_store();
      if (first && end.limit() > Milliseconds(0)) {
        end = Deadline::after(std::max(kCauseSearch, kCauseSearchTurns * answers_in_));
      }
      if (end.expired()) return error;
      std::this_thread::sleep_for(kPause);
    }
  } catch (const Timeout&) {  // our text names the missing ranks; others have the same deadline
    return late ? error : std::current_exception();
  } catch (const std::exception&) {  // a store that fails now, perhaps of the same cause, says less
    return knows_ ? std::current_exception() : error;
  }
}

void Membership::give_up(const std::exception_ptr& error) {
  const std::exception_ptr cause = behind(error);
  try {
    if (!find_word(rendezvous_, kReason)) {
      set_word(rendezvous_, kReason, to_notice(cause, rendezvous_.rank).encoded());
    }
  } catch (const std::exception&) {  // without a store no rank can be told
  }
  std::rethrow_exception(cause);
}

}  // namespace pycomm
