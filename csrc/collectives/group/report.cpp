// State of every rank relative to the collective that most ranks are in.
#include "collectives/group/report.h"

#include <algorithm>
#include <map>

namespace pycomm {
namespace {

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
struct Verb {
  const char* one;
  const char* many;
};
constexpr Verb kVerbs[] = {
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

}  // namespace

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
    const Verb& verb = kVerbs[static_cast<int>(role)];
    const std::string line =
        "\n  " + rank_list(ranks) + (ranks.size() == 1 ? verb.one : verb.many) + ": " + state;
    if (more > 0 || i >= kMaxLines || text.size() + line.size() > kMaxBytes) {
      more += ranks.size();
    } else {
      text += line;
    }
  }
  if (more > 0) text += "\n  and " + std::to_string(more) + " more ranks";
  return text;
}

}  // namespace pycomm
