// One rank of a group whose ranks run on different processors: collectives over TCP on values that
// follow from the rank, and the CRC-32C of each result on stdout, a line each.
//
// usage: rank FOLDER RANK RANKS. The folder is empty at first; the ranks meet in it. It links
// libpycomm, or is compiled with the sources of the core.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "codecs/base/codec.h"
#include "collectives/communicator.h"
#include "core/crc32c.h"
#include "transports/store.h"

namespace {

using pycomm::DType;
using pycomm::Op;

constexpr size_t kNumel = 10007;  // odd, and of several segments
constexpr int kSteps = 3;

/// Values that differ by rank and step, of many magnitudes, with some zeros and denormals.
std::vector<float> values_of(int rank, int step) {
  uint32_t state = static_cast<uint32_t>(977 * rank + 31 * step + 1);
  std::vector<float> values(kNumel);
  for (float& value : values) {
    state = state * 1664525u + 1013904223u;
    const int shift = static_cast<int>(state >> 28);
    value = static_cast<float>(static_cast<int32_t>(state << 4)) / static_cast<float>(1u << 31) /
            static_cast<float>(1u << shift);
    if (state % 101 == 0) value = 0.0f;
    if (state % 103 == 0) value *= 1e-39f;
  }
  return values;
}

template <typename T>
uint32_t digest(const std::vector<T>& values, uint32_t before = 0) {
  return pycomm::crc32c(
      {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(T)}, before);
}

/// Float32 residual with two sides, as Feedback takes it.
struct Residual {
  std::vector<float> sides[2] = {std::vector<float>(kNumel), std::vector<float>(kNumel)};

  pycomm::feedback::Feedback at(int step) {
    pycomm::feedback::Feedback feedback;
    feedback.error = {reinterpret_cast<const uint8_t*>(sides[step % 2].data()),
                      reinterpret_cast<uint8_t*>(sides[(step + 1) % 2].data())};
    return feedback;
  }
};

void coded(pycomm::Communicator& group, const std::string& text) {
  const auto codec = pycomm::make_codec(text);
  Residual worker, owner;
  uint32_t result = 0;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<float> values = values_of(group.rank(), step);
    pycomm::Piece piece;
    piece.numel = kNumel;
    piece.codec = codec.get();
    piece.worker = worker.at(step);
    piece.owner = owner.at(step);
    pycomm::CodedArgs args;
    args.data = {values.data(), kNumel, DType::float32};
    args.pieces = {&piece, 1};
    args.seed = 7;
    args.step = static_cast<uint32_t>(step);
    if (!group.run_coded(Op::all_reduce, args)) throw std::runtime_error(text + " is not finite");
    result = digest(values, result);
  }
  std::printf("%s %08x residual %08x\n", text.c_str(), result,
              digest(owner.sides[kSteps % 2], digest(worker.sides[kSteps % 2])));
}

void plain(pycomm::Communicator& group) {
  std::vector<float> sum = values_of(group.rank(), 0);
  group.run({Op::all_reduce, DType::float32, {sum.data(), kNumel}, {sum.data(), kNumel}});
  std::printf("all_reduce %08x\n", digest(sum));
  const std::vector<float> mine = values_of(group.rank(), 1);
  std::vector<float> all(kNumel * static_cast<size_t>(group.size()));
  group.run({Op::all_gather, DType::float32, {mine.data(), kNumel}, {all.data(), kNumel}});
  std::printf("all_gather %08x\n", digest(all));
  std::vector<float> root = values_of(group.rank(), 2);
  pycomm::Collective call{
      Op::broadcast, DType::float32, {root.data(), kNumel}, {root.data(), kNumel}};
  call.root = group.size() - 1;
  group.run(call);
  std::printf("broadcast %08x\n", digest(root));
}

int run(const std::string& folder, int rank, int ranks) {
  pycomm::CommunicatorOptions options;
  options.transport = "tcp";
  for (int node = 0; node < ranks; ++node) options.nodes.push_back(node);
  options.timeout = pycomm::Milliseconds(120000);
  pycomm::Communicator group(pycomm::make_file_store(folder), rank, ranks, options);
  plain(group);
  for (const char* text :
       {"cast:dtype=bfloat16", "quant:bits=4", "quant:bits=8,rounding=stochastic",
        "mx:format=fp4_e2m1", "sign", "eden:bits=2", "topk:density=0.01", "lossless"})
    coded(group, text);
  group.barrier();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  try {
    return run(argv[1], std::atoi(argv[2]), std::atoi(argv[3]));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %s: %s\n", argv[2], error.what());
    return 1;
  }
}
