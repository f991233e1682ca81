#include "collectives/group/failure.h"

#include <algorithm>
#include <new>

#include "collectives/group/channel_mesh.h"
#include "collectives/group/report.h"
#include "core/interrupt.h"
#include "core/notice.h"

namespace pycomm {
namespace {

/// " in all_reduce #7 (...)" or " after all_reduce #7", for the middle of a sentence.
std::string doing(const RankState& rank_state) {
  if (rank_state.inside()) return " in " + describe(rank_state.call);
  if (rank_state.waits.op != Op::none) return " in " + describe(rank_state.waits);
  if (rank_state.completed == 0) return "";
  return std::string(" after ") + name(rank_state.completed_op) + " #" +
         std::to_string(rank_state.completed);
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

/// Returns `error` with the state of every rank in its text, if it is an error that ends a group
/// because of other ranks. May take a moment. `lane` is the one that the caller drives. What
/// `advice` returns is added to the text of calls that differ.
std::exception_ptr with_rank_states(const std::exception_ptr& error, ChannelMesh& mesh, Lane lane,
                                    const std::function<std::string()>& advice) {
  const RankState own = mesh.rank_state().load();
  try {
    std::rethrow_exception(error);
  } catch (const std::bad_alloc&) {
    return std::make_exception_ptr(Error("rank " + std::to_string(mesh.rank()) +
                                         ": no memory is left for " +
                                         describe(own.inside() ? own.call : own.waits)));
  } catch (...) {
  }
  Notice notice = to_notice(error, mesh.rank());
  if (notice.kind == Notice::Kind::error) return error;
  Report report;
  report.rank = mesh.rank();
  report.mismatch = notice.kind == Notice::Kind::mismatch;
  if (report.mismatch) notice.text = with_advice(notice.text) + advice();
  if (notice.kind == Notice::Kind::timeout) report.waited_for = notice.ranks;
  report.ranks = mesh.survey(lane, report.mismatch && own.inside() ? own.call.seq : 0);
  notice.text += table(report);
  std::vector<int> gone;
  for (int r = 0; r < mesh.size(); r++) {
    const bool known = std::count(notice.ranks.begin(), notice.ranks.end(), r) > 0;
    if (known || report.ranks[r].liveness == PeerStatus::Liveness::died) gone.push_back(r);
  }
  if (notice.kind == Notice::Kind::lost) notice.ranks = gone;
  return error_of(notice);
}

}  // namespace

void Failure::set(std::exception_ptr error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (happened()) return;
  first_ = std::move(error);
  happened_.store(true, std::memory_order_release);
}

void Failure::rethrow_in(const OpTag& call, int rank) const {
  Notice notice = to_notice(first_, rank);
  notice.text = text();
  const std::string ours = describe(call);
  std::string more;
  if (notice.text.find(ours) == std::string::npos) {
    more = " (seen by rank " + std::to_string(rank) + " in " + ours + ")";
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    more += added_;
  }
  // In a text of several lines the first says what happened, the others what ranks were doing.
  notice.text.insert(std::min(notice.text.find('\n'), notice.text.size()), more);
  throw_error(notice);
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

void Failure::end(ChannelMesh& mesh, Lane lane, Trace& trace,
                  const std::function<std::string()>& advice) {
  std::exception_ptr thrown;
  try {
    throw;
  } catch (const Interrupted& e) {  // its cause is for the caller alone
    thrown =
        std::make_exception_ptr(Error("rank " + std::to_string(mesh.rank()) + " was interrupted" +
                                      doing(mesh.rank_state().load()) + ": " + e.what()));
  } catch (...) {
    thrown = from_notice(std::current_exception());
  }
  if (happened()) {
    // The thread that was first may not have told the others yet; all must be able to know before
    // our caller continues.
    mesh.abort(to_notice(error(), mesh.rank()));
  } else {
    try {
      const std::exception_ptr error =
          mesh.aborted() ? thrown : with_rank_states(thrown, mesh, lane, advice);
      // What another rank has reported meanwhile is the cause.
      const std::exception_ptr cause = mesh.aborted();
      set(cause ? cause : error);
      mesh.abort(to_notice(cause ? cause : error, mesh.rank()));
      trace.set_error(text());
    } catch (const std::bad_alloc&) {  // not enough memory for the full text
      set(thrown);
      mesh.abort(plain_notice("out of memory", mesh.rank()));
    }
  }
  if (lane != Lane::collective) return;
  const std::string problem = mesh.take_back_heap();
  std::lock_guard<std::mutex> lock(mutex_);
  if (!problem.empty()) added_ = problem;
}

void Failure::abort(ChannelMesh& mesh, Trace& trace, const std::string& reason) noexcept {
  const std::string text = "rank " + std::to_string(mesh.rank()) + " was aborted" +
                           doing(mesh.rank_state().load()) + ": " + reason;
  set(std::make_exception_ptr(Error(text)));
  mesh.abort(plain_notice(text, mesh.rank()));
  trace.set_error(text);
}

std::string describe_ranks(ChannelMesh& mesh) {
  Report report;
  report.rank = mesh.rank();
  // Asks on the lane that knows no more than what ranks answer: the other lane belongs to a thread.
  report.ranks = mesh.survey(Lane::point_to_point, 0);
  return table(report);
}

}  // namespace pycomm
