// Checksums of results, and the vote on those that differ.
#include "collectives/group/result_checksums.h"

#include <algorithm>
#include <map>

#include "collectives/group/report.h"
#include "core/crc32c.h"
#include "core/error.h"

namespace pycomm {
namespace {

using Sides = std::map<uint32_t, std::vector<int>>;  // ranks by digest

OpTag without_digests(OpTag tag) {
  tag.result = tag.state = 0;
  return tag;
}

/// Formats "rank 2 has other bytes than ranks 0-1, 3", by the majority's bytes if there is one.
std::string vote(const Sides& sides) {
  std::vector<std::vector<int>> groups;
  for (const auto& side : sides) groups.push_back(side.second);
  std::stable_sort(groups.begin(), groups.end(),
                   [](const auto& a, const auto& b) { return a.size() > b.size(); });
  if (groups[0].size() > groups[1].size()) {
    std::vector<int> others;
    for (size_t i = 1; i < groups.size(); i++) {
      others.insert(others.end(), groups[i].begin(), groups[i].end());
    }
    std::sort(others.begin(), others.end());
    return rank_list(others) + (others.size() == 1 ? " has" : " have") + " other bytes than " +
           rank_list(groups[0]);
  }
  std::sort(groups.begin(), groups.end());
  std::string text;
  for (const std::vector<int>& group : groups) {
    text += (text.empty() ? "" : " against ") + rank_list(group);
  }
  return text + "; no majority tells which side is right";
}

}  // namespace

bool checks_results(const std::string& word) {
  if (word == "none" || word == "results") return word == "results";
  throw Error("unknown check \"" + word + "\"; use one of none, results");
}

uint32_t digest(const Parts& parts, int count, uint32_t before) {
  uint32_t crc = before;
  for (int r = 0; r < count; r++) crc = crc32c(parts[r], crc);
  return crc ? crc : 1;
}

void ResultChecksums::compare(std::string what, uint32_t digest) {
  if (!on_) return;
  what_ = std::move(what);
  state_ = digest;
}

void ResultChecksums::keep(const OpTag& tag, const ReplicatedResult& result) {
  if (!on_ || result.count == 0) return;
  const uint64_t head[] = {tag.seq, static_cast<uint64_t>(tag.op),
                           result.parts.total(result.count)};
  const uint32_t begin = crc32c({reinterpret_cast<const uint8_t*>(head), sizeof head});
  result_ = digest(result.parts, result.count, begin);
  call_ = tag;
}

std::string ResultChecksums::verdict(int rank, const std::vector<PeerStatus>& ranks) const {
  const OpTag& ours = ranks[rank].rank_state.call;
  Sides results, states;
  for (size_t r = 0; r < ranks.size(); r++) {
    const OpTag& theirs = ranks[r].rank_state.call;
    if (theirs.seq != ours.seq) continue;
    if (without_digests(theirs).hash() != without_digests(ours).hash()) return "";
    results[theirs.result].push_back(static_cast<int>(r));
    states[theirs.state].push_back(static_cast<int>(r));
  }
  std::string text;
  const auto report = [&](const std::string& what, const Sides& sides) {
    if (sides.size() < 2) return;
    text += (text.empty() ? "ranks disagree on " : "; and on ") + what + ": " + vote(sides);
  };
  report("the result of " + describe(call_), results);
  report(what_, states);
  if (text.empty()) return "";
  return text + "; found by " + describe(without_digests(ours)) +
         ". Memory or a processor may be faulty there, or code writes to what an operation uses "
         "before it ends; go on from a checkpoint";
}

}  // namespace pycomm
