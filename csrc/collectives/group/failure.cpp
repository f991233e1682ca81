#include "collectives/group/failure.h"

#include <algorithm>
#include <new>

#include "collectives/group/channel_mesh.h"
#include "collectives/group/report.h"

namespace pycomm {
namespace {

// `lost` and the other ranks that have died.
std::vector<int> all_gone(const PeerLost& lost, const std::vector<PeerStatus>& ranks) {
  std::vector<int> gone;
  for (int r = 0; r < static_cast<int>(ranks.size()); r++) {
    const bool known = std::find(lost.ranks.begin(), lost.ranks.end(), r) != lost.ranks.end();
    if (known || ranks[r].liveness == PeerStatus::Liveness::died) gone.push_back(r);
  }
  return gone;
}

/// Adds what to do about a mismatch of two calls, if that is known.
std::string with_advice(std::string text) {
  if (text.find(kPathsLabel) == std::string::npos || text.find("device_path") != std::string::npos)
    return text;
  return text +=
         "; this is the first collective whose tensor is on an accelerator, and the other rank's "
         "may be on the CPU: make the group with pycomm.Options(device_path=\"mixed\") on all "
         "ranks";
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

std::exception_ptr with_rank_states(const std::exception_ptr& error, ChannelMesh& mesh, Lane lane,
                                    const std::string& order) {
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
    return std::make_exception_ptr(WireMismatch(text(with_advice(e.what()) + order)));
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

std::string describe_ranks(ChannelMesh& mesh) {
  Report report;
  report.rank = mesh.rank();
  // Asks on the lane that knows no more than what ranks answer: the other lane belongs to a thread.
  report.ranks = mesh.survey(Lane::point_to_point, 0);
  return table(report);
}

}  // namespace pycomm
