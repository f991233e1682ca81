#include "collectives/algorithms/round_trips.h"

#include "collectives/algorithms/bruck.h"
#include "collectives/algorithms/direct.h"

namespace pycomm {
namespace {

// Up to this many ranks each sends to each: one way instead of a logarithm of them.
constexpr int kMostDirect = 64;

}  // namespace

std::vector<uint32_t> gather_round_trips(CollectiveContext& context, const ChannelMesh& mesh) {
  const int n = context.size();
  const auto size = static_cast<size_t>(n);
  std::vector<uint32_t> measured(size * size);
  std::vector<uint32_t> own(size);
  for (int r = 0; r < n; r++) own[static_cast<size_t>(r)] = mesh.round_trip(r);
  const Parts rows = Parts(measured.data(), size).of(sizeof(uint32_t));
  const Collective call{Op::all_gather, DType::uint8, {own.data(), rows.bytes(0)}, rows};
  (n <= kMostDirect ? direct::exchange : bruck::all_gather)(context, call);
  std::vector<uint32_t> round_trips = measured;
  for (size_t i = 0; i < size; i++) {
    for (size_t j = 0; j < size; j++) {
      // 0 says that a rank does not know: the connection may just be cut.
      const auto [less, more] = std::minmax(measured[i * size + j], measured[j * size + i]);
      round_trips[i * size + j] = less > 0 ? less : more;
    }
  }
  return round_trips;
}

}  // namespace pycomm
