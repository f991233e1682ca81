#include "collectives/attendance.h"

#include <algorithm>
#include <thread>

#include "collectives/failure.h"
#include "core/error.h"

namespace pycomm {
namespace {

// Before all have come we ask the store for the words of the ranks nearest to us alone: they are
// likely on our host, and one witness is enough.
constexpr int kNear = 8;
// How long we look for what is behind an error of ours. Who knows it says so before it leaves.
constexpr Milliseconds kReflection(100);
constexpr Milliseconds kPause(10);

}  // namespace

Attendance::Attendance(const Rendezvous& meeting, const CommunicatorOptions& options)
    : meeting_(meeting),
      options_(options),
      reason_key_(meeting.group + "/given up"),
      next_look_(Deadline::after(Milliseconds(0))) {
  if (!options.parent) return;
  if (options.parent_ranks.size() != static_cast<size_t>(meeting.size)) {
    throw Error(std::to_string(options.parent_ranks.size()) + " ranks of the parent group for " +
                std::to_string(meeting.size) + " ranks; name one for each");
  }
  for (const int rank : options.parent_ranks) {
    if (rank >= 0 && rank < options.parent->size()) continue;
    throw Error("rank " + std::to_string(rank) + " is not in the parent group of " +
                std::to_string(options.parent->size()));
  }
  parent_was_over_ = options.parent->over() != nullptr;
}

std::string Attendance::key(const std::string& topic, int rank) const {
  return meeting_.group + "/" + topic + "/" + std::to_string(rank);
}

std::string Attendance::word(const std::string& agreed) const {
  return agreed + "\n" + process_name();
}

std::string Attendance::came(int rank, const std::string& word) {
  const size_t end = std::min(word.find('\n'), word.size());
  // Ranks that a test declares to be of another node cannot be seen.
  const auto& nodes = options_.nodes;
  const bool near = nodes.empty() || nodes[rank] == nodes[meeting_.rank];
  if (near && end < word.size()) processes_.emplace(rank, Process(word.substr(end + 1)));
  return word.substr(0, end);
}

void Attendance::look_out() {
  if (!next_look_.expired()) return;
  next_look_ = Deadline::after(meeting_.patience() / 2);
  try {
    if (options_.interrupt) options_.interrupt();
    if (options_.parent && !parent_was_over_) {
      if (const std::exception_ptr error = options_.parent->over()) std::rethrow_exception(error);
    }
    look_for_deaths();
    look_for_words();
  } catch (...) {
    knows_ = true;
    throw;
  }
}

void Attendance::look_for_deaths() {
  for (int r = 0; r < meeting_.size && options_.parent; r++) {
    if (r != meeting_.rank && options_.parent->lost(options_.parent_ranks[r]) && !has_met(r)) {
      throw_died(r, "the group that it is in already has lost it");
    }
  }
  for (const auto& [rank, process] : processes_) {
    if (process.died() && !has_met(rank)) {
      throw_died(rank, "its process " + std::to_string(process.id()) + " is gone");
    }
  }
}

void Attendance::look_for_words() {
  if (const auto reason = meeting_.store->find(reason_key_)) {
    std::rethrow_exception(from_reason(std::make_exception_ptr(Error(*reason))));
  }
  const int first = std::max(0, meeting_.rank - kNear);
  const int last = std::min(meeting_.size - 1, meeting_.rank + kNear);
  for (int r = first; r <= last; r++) {
    if (r == meeting_.rank || processes_.count(r) > 0) continue;
    if (const auto word = meeting_.store->find(key(kTopic, r))) came(r, *word);
  }
}

bool Attendance::has_met(int rank) {
  try {
    return meeting_.store->find(key("met", rank)).has_value();
  } catch (const Error&) {  // the store died with it
    return false;
  }
}

void Attendance::throw_died(int rank, const std::string& how) const {
  throw PeerLost(rank, "rank " + std::to_string(rank) + " died while group \"" + meeting_.group +
                           "\" was made: " + how + " (seen by rank " +
                           std::to_string(meeting_.rank) + "); look at its own log");
}

void Attendance::leave() { meeting_.store->set(key("met", meeting_.rank), "yes"); }

std::exception_ptr Attendance::behind(const std::exception_ptr& error) {
  // The others are refused by us from now on and reflect on it: until then they must have our word.
  if (knows_) return error;
  Deadline end = Deadline::after(Milliseconds(0));
  bool late = false;
  try {
    std::rethrow_exception(error);
  } catch (const WireMismatch&) {  // we know what we have seen
    return error;
  } catch (const Timeout&) {
    late = true;
  } catch (const Error&) {  // a connection that is refused, a store that is gone: of whom?
    end = Deadline::after(kReflection);
  } catch (...) {  // a signal, no memory
    return error;
  }
  try {
    for (;;) {
      look_for_deaths();
      look_for_words();
      if (end.expired()) return error;
      std::this_thread::sleep_for(kPause);
    }
  } catch (const Timeout&) {  // the others' deadline is ours, and our text says whom we missed
    return late ? error : std::current_exception();
  } catch (const std::exception&) {
    return std::current_exception();
  }
}

void Attendance::give_up(const std::exception_ptr& error) {
  const std::exception_ptr cause = behind(error);
  try {
    if (!meeting_.store->find(reason_key_)) {
      meeting_.store->set(reason_key_, "rank " + std::to_string(meeting_.rank) +
                                           " has left the meeting of group \"" + meeting_.group +
                                           "\": " + to_reason(cause));
    }
  } catch (const std::exception&) {  // without a store nobody can be told
  }
  std::rethrow_exception(cause);
}

}  // namespace pycomm
