#include "collectives/coded/one_shot.h"

#include <algorithm>

namespace pycomm::coded {
namespace {

// Seconds to encode or to decode a value, of the slower codecs on one core.
constexpr double kCode = 0.8e-9;

struct Decision {
  bool one_shot;
  std::string why;
};

/// What goes_in_one_shot() says.
Decision decide(const CodedArgs& args, const PieceRuns& values, Algo wanted, int ranks,
                const Speed& speed) {
  size_t numel = 0, payload = 0;
  for (const PieceRun& run : values) {
    const Codec& codec = *args.pieces[run.piece].codec;
    if (codec.combine() == Combine::gather) {
      return {false,
              "payloads of " + std::string(codec.name()) + " go to all ranks, which sum them"};
    }
    numel += run.numel;
    payload += codec.encoded_bytes(run.numel);
  }
  if (args.owner_residuals) return {false, "owners may have residuals"};
  if (ranks < 2) return {false, "there is one rank"};
  if (wanted == Algo::two_shot || wanted == Algo::one_shot) {
    return {wanted == Algo::one_shot, "it was asked for"};
  }
  if (speed.way == 0) return {false, "ranks are near each other"};
  const ShotCosts costs = shot_costs(numel, payload, ranks, speed);
  return {costs.one < costs.two,
          time_text(costs.one) + " in one shot, " + time_text(costs.two) + " in two"};
}

}  // namespace

// A rank encodes what it contributes and decodes the result. As an owner of one part of n it also
// decodes n contributions to that part, and encodes their sum; in one shot it does so for all.
// Coding and sending overlap, but where no rate is known the link may be too fast to hide any work.
ShotCosts shot_costs(size_t values, size_t payload, int ranks, const Speed& speed) {
  const double n = ranks, code = kCode * static_cast<double>(values);
  const double work_one = (2 + n + 1) * code, work_two = (2 + (n + 1) / n) * code;
  const double byte = speed.byte * static_cast<double>(payload);
  double one = (n - 1) * byte, two = 2 * (n - 1) / n * byte;
  if (speed.shared == 0) return {speed.way + (one - two) + work_one, 2 * speed.way + work_two};
  two = std::min(two, speed.shared * byte);
  return {speed.way + std::max(one, work_one), 2 * speed.way + std::max(two, work_two)};
}

bool goes_in_one_shot(const CodedArgs& args, const PieceRuns& values, Algo wanted, int ranks,
                      const Speed& speed) {
  return decide(args, values, wanted, ranks, speed).one_shot;
}

std::string explain(const CodedArgs& args, Algo wanted, int ranks, const Speed& speed) {
  const Decision found = decide(args, values_of(args.pieces), wanted, ranks, speed);
  return std::string(found.one_shot ? "one_shot: " : "two_shot: ") + found.why;
}

}  // namespace pycomm::coded
