#include "collectives/group/failure.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <string_view>
#include <typeinfo>

#include "collectives/group/channel_mesh.h"
#include "collectives/group/report.h"
#include "collectives/group/result_checksums.h"

namespace pycomm {
namespace {

constexpr char kTimeout[] = "[timeout] ";
constexpr char kMismatch[] = "[mismatch] ";
constexpr char kLost[] = "[lost ";  // "[lost 3] ", or "[lost 3,1,5] ", of which the first is named

// `lost` and the other ranks that have died.
std::vector<int> all_gone(const PeerLost& lost, const std::vector<PeerStatus>& ranks) {
  std::vector<int> gone;
  for (int r = 0; r < static_cast<int>(ranks.size()); r++) {
    const bool known = std::find(lost.ranks.begin(), lost.ranks.end(), r) != lost.ranks.end();
    if (known || ranks[r].liveness == PeerStatus::Liveness::died) gone.push_back(r);
  }
  return gone;
}

std::string lost_mark(const PeerLost& lost) {
  std::string mark = kLost + std::to_string(lost.rank);
  for (const int rank : lost.ranks) {
    if (rank != lost.rank) mark += "," + std::to_string(rank);
  }
  return mark + "] ";
}

// Parses the numbers of a mark, up to its bracket.
PeerLost from_lost_mark(std::string_view numbers, const std::string& what) {
  std::vector<int> ranks;
  for (size_t at = 0; at < numbers.size();) {
    const size_t end = std::min(numbers.find(',', at), numbers.size());
    ranks.push_back(std::atoi(std::string(numbers.substr(at, end - at)).c_str()));
    at = end + 1;
  }
  const int named = ranks.empty() ? -1 : ranks.front();
  std::sort(ranks.begin(), ranks.end());
  return PeerLost(named, what, std::move(ranks));
}

}  // namespace

void Failure::set(std::exception_ptr error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (happened()) return;
  first_ = std::move(error);
  happened_.store(true, std::memory_order_release);
}

void Failure::add(const std::string& sentence) {
  std::lock_guard<std::mutex> lock(mutex_);
  added_ = sentence;
}

void Failure::rethrow_in(const OpTag& call, int rank) const {
  const std::string ours = describe(call);
  std::string more;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    more = added_;
  }
  // In a text of several lines the first says what happened, the others what ranks were doing.
  const auto with_call = [&](std::string text) {
    const std::string where = " (seen by rank " + std::to_string(rank) + " in " + ours + ")";
    const bool known = text.find(ours) != std::string::npos;
    return text.insert(std::min(text.find('\n'), text.size()), (known ? "" : where) + more);
  };
  try {
    std::rethrow_exception(first_);
  } catch (const Timeout& e) {
    throw Timeout(with_call(e.what()), e.waited_for);
  } catch (const PeerLost& e) {
    throw PeerLost(e.rank, with_call(e.what()), e.ranks);
  } catch (const WireMismatch& e) {
    throw WireMismatch(with_call(e.what()));
  } catch (const Error& e) {
    throw Error(with_call(e.what()));
  }
}

std::string Failure::text() const {
  try {
    rethrow();
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "unknown error";
  }
  return "";
}

std::exception_ptr explained(const std::exception_ptr& error, ChannelMesh& mesh, Lane lane,
                             const ResultChecksums* result_checksums) {
  Report report;
  report.rank = mesh.rank();
  const auto text = [&](const std::string& what) {
    const RankState own = mesh.rank_state().load();
    report.ranks = mesh.survey(lane, report.mismatch && own.inside() ? own.call.seq : 0);
    return what + table(report);
  };
  try {
    std::rethrow_exception(error);
  } catch (const Timeout& e) {
    report.waited_for = e.waited_for;
    return std::make_exception_ptr(Timeout(text(e.what()), e.waited_for));
  } catch (const WireMismatch& e) {
    report.mismatch = true;
    const std::string calls = text(e.what());
    std::string results;
    if (result_checksums && e.peer >= 0) {
      report.ranks[e.peer].rank_state.call = e.theirs;  // by now it may be in its next call
      results = result_checksums->verdict(report.rank, report.ranks);
    }
    return std::make_exception_ptr(WireMismatch(results.empty() ? calls : results));
  } catch (const PeerLost& e) {
    const std::string what = text(e.what());
    return std::make_exception_ptr(PeerLost(e.rank, what, all_gone(e, report.ranks)));
  } catch (const std::bad_alloc&) {
    const RankState own = mesh.rank_state().load();
    return std::make_exception_ptr(Error("rank " + std::to_string(mesh.rank()) +
                                         ": no memory is left for " +
                                         describe(own.inside() ? own.call : own.waits)));
  } catch (...) {
    return error;
  }
}

std::string whereabouts(ChannelMesh& mesh) {
  Report report;
  report.rank = mesh.rank();
  // Asks on the lane that knows no more than what ranks answer: the other lane belongs to a thread.
  report.ranks = mesh.survey(Lane::point_to_point, 0);
  return table(report);
}

std::string to_reason(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Timeout& e) {
    return kTimeout + std::string(e.what());
  } catch (const WireMismatch& e) {
    return kMismatch + std::string(e.what());
  } catch (const PeerLost& e) {
    return lost_mark(e) + e.what();
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "unknown error";
  }
}

std::exception_ptr from_reason(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    if (typeid(e) != typeid(Error)) return error;
    const std::string text = e.what();
    // The words before the kind name the rank that aborted; those after it name the rank
    // themselves.
    const auto after = [&text](size_t at, size_t length) { return text.substr(at + length); };
    size_t at = text.find(kTimeout);
    if (at != std::string::npos)
      return std::make_exception_ptr(Timeout(after(at, sizeof(kTimeout) - 1)));
    at = text.find(kMismatch);
    if (at != std::string::npos)
      return std::make_exception_ptr(WireMismatch(after(at, sizeof(kMismatch) - 1)));
    at = text.find(kLost);
    const size_t end = at == std::string::npos ? at : text.find("] ", at);
    if (end != std::string::npos) {
      const size_t begin = at + sizeof(kLost) - 1;
      const std::string_view numbers(text.data() + begin, end - begin);
      return std::make_exception_ptr(from_lost_mark(numbers, after(at, end + 2 - at)));
    }
    return error;
  } catch (...) {
    return error;
  }
}

}  // namespace pycomm
