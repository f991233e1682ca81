#include "collectives/group/failure.h"

#include <algorithm>
#include <map>
#include <new>
#include <utility>
#include <vector>

#include "collectives/group/channel_mesh.h"
#include "core/interrupt.h"
#include "core/notice.h"

namespace pycomm {

std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) end++;
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
    if (end - i > 1) text += "-" + std::to_string(ranks[end - 1]);
    i = end;
  }
  return text;
}

namespace {

// State of every rank, relative to the collective that most ranks are in, in a few lines: ranks in
// the same state share one.

struct Report {
  int rank = 0;                   ///< the reporter
  std::vector<PeerStatus> ranks;  ///< all of the group, the reporter included
  std::vector<int> waited_for;    ///< by the reporter
  bool mismatch = false;          ///< calls differ; else some rank did not join, or is gone
};

constexpr size_t kMaxLines = 12;
// Size limit: with its headline a report fits into the abort reason of transports, about 1000
// bytes.
constexpr size_t kMaxBytes = 700;

// Roles in the order of the lines: the first ones explain why the others wait.
enum class Role {
  died,
  left,
  stopped,
  silent,
  missing,
  differs,
  behind,
  ahead,
  stuck,
  waits,
  plain,
};
// Their verbs: of one rank, and of several.
constexpr std::pair<const char*, const char*> kVerbs[] = {
    {" died", " died"},
    {" has left", " have left"},
    {" is stopped", " are stopped"},
    {" does not answer", " do not answer"},
    {" is missing", " are missing"},
    {" differs", " differ"},
    {" is behind", " are behind"},
    {" is ahead", " are ahead"},
    {" does not progress", " do not progress"},
    {" waits", " wait"},
    {"", ""},
};

struct Line {
  Role role;
  std::string state;
  std::vector<int> ranks;
};

// Returns the call that most ranks are in; in a draw the reporter's, or none if the question is
// which ranks differ. Op::none if the reporter is not in a collective: then the others need not be.
OpTag common_call(const Report& report) {
  const RankState& own = report.ranks[report.rank].rank_state;
  if (!own.inside()) return OpTag();
  std::map<uint32_t, int> votes;
  OpTag best;
  int most = 0;
  bool draw = false;
  for (const PeerStatus& status : report.ranks) {
    if (!status.rank_state.inside()) continue;
    const int count = ++votes[status.rank_state.call.hash()];
    if (count < most) continue;
    draw = count == most;
    most = count;
    best = status.rank_state.call;
  }
  if (!draw) return best;
  return report.mismatch ? OpTag() : own.call;
}

Role role_of(const PeerStatus& status, const OpTag& common, bool mismatch) {
  switch (status.liveness) {
    case PeerStatus::Liveness::died:
      return Role::died;
    case PeerStatus::Liveness::left:
      return Role::left;
    case PeerStatus::Liveness::stopped:
      return Role::stopped;
    case PeerStatus::Liveness::silent:
      return Role::silent;
    case PeerStatus::Liveness::here:
      break;
  }
  const RankState& rank_state = status.rank_state;
  if (common.op == Op::none) return Role::plain;
  if (!rank_state.inside()) return rank_state.completed < common.seq ? Role::missing : Role::ahead;
  if (rank_state.call.hash() == common.hash()) return mismatch ? Role::plain : Role::waits;
  if (rank_state.call.seq == common.seq) return Role::differs;
  return rank_state.call.seq < common.seq ? Role::behind : Role::ahead;
}

std::string state_of(const PeerStatus& status) {
  const RankState& rank_state = status.rank_state;
  if (status.liveness == PeerStatus::Liveness::silent) {
    return rank_state.call.op == Op::none ? "no message from it"
                                          : "last message in " + describe(rank_state.call);
  }
  const std::string now = rank_state.inside()               ? "in " + describe(rank_state.call)
                          : rank_state.waits.op != Op::none ? "in " + describe(rank_state.waits)
                                                            : "in no operation";
  if (rank_state.completed == 0) return now + ", nothing completed";
  return now + ", last completed " + name(rank_state.completed_op) + " #" +
         std::to_string(rank_state.completed);
}

/// Lines that each begin with "
///   ", the ranks that are to blame first:
///
///   rank 2 is missing: in no operation, last completed barrier #1
///   ranks 0-1, 3 wait: in all_reduce #2 (sum of 10 float64), last completed barrier #1
std::string table(const Report& report) {
  const OpTag common = common_call(report);
  std::vector<Role> roles;
  for (const PeerStatus& s : report.ranks) roles.push_back(role_of(s, common, report.mismatch));
  // All have joined: those from which the reporter received nothing make no progress.
  const bool all_wait =
      std::all_of(roles.begin(), roles.end(), [](Role role) { return role == Role::waits; });
  for (const int rank : report.waited_for) {
    if (all_wait) roles[rank] = Role::stuck;
  }

  std::vector<Line> lines;
  for (size_t r = 0; r < roles.size(); r++) {
    const std::string state = state_of(report.ranks[r]);
    auto line = std::find_if(lines.begin(), lines.end(), [&](const Line& other) {
      return other.role == roles[r] && other.state == state;
    });
    if (line == lines.end()) line = lines.insert(line, {roles[r], state, {}});
    line->ranks.push_back(static_cast<int>(r));
  }
  std::stable_sort(lines.begin(), lines.end(),
                   [](const Line& a, const Line& b) { return a.role < b.role; });
  std::string text;
  size_t more = 0;
  for (size_t i = 0; i < lines.size(); i++) {
    const auto& [role, state, ranks] = lines[i];
    const auto& [one, many] = kVerbs[static_cast<int>(role)];
    const std::string line =
        "\n  " + rank_list(ranks) + (ranks.size() == 1 ? one : many) + ": " + state;
    if (more > 0 || i >= kMaxLines || text.size() + line.size() > kMaxBytes) {
      more += ranks.size();
    } else {
      text += line;
    }
  }
  if (more > 0) text += "\n  and " + std::to_string(more) + " more ranks";
  return text;
}

/// " in all_reduce #7 (...)" or " after all_reduce #7", for the middle of a sentence.
std::string doing(const RankState& rank_state) {
  if (rank_state.inside()) return " in " + describe(rank_state.call);
  if (rank_state.waits.op != Op::none) return " in " + describe(rank_state.waits);
  if (rank_state.completed == 0) return "";
  return std::string(" after ") + name(rank_state.completed_op) + " #" +
         std::to_string(rank_state.completed);
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
  if (report.mismatch && notice.text.find(kPathsLabel) != std::string::npos) {
    notice.text +=
        "; this is the first collective whose tensor is on an accelerator, and the other rank's "
        "may be on the CPU: pass tensors of one kind of device on all ranks";
  }
  if (report.mismatch) notice.text += advice();
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
