// Payloads that hold anything, for every codec: no decoder leaves its memory.
//
// Input: codec, number of values (two bytes), payload.
#include <cstring>
#include <initializer_list>
#include <memory>
#include <utility>

#include "codecs/base/codec.h"
#include "tests/fuzz/target.h"

namespace {

using pycomm::Codec;

constexpr size_t kMostValues = 5000;
constexpr size_t kNumbers = 39;

/// The codecs by the number that an input gives. The number of a codec that was removed stays free:
/// the corpus has payloads for the others.
const std::vector<std::unique_ptr<Codec>>& codecs() {
  static const auto* all = [] {
    auto* made = new std::vector<std::unique_ptr<Codec>>(kNumbers);
    for (const auto& [number, spec] : std::initializer_list<std::pair<size_t, const char*>>{
             {0, "cast:dtype=float32"},
             {1, "cast:dtype=float16"},
             {2, "cast:dtype=bfloat16"},
             {3, "cast:dtype=float8_e4m3,block=256"},
             {4, "cast:dtype=float8_e5m2,block=32"},
             {5, "quant:bits=8,block=256"},
             {6, "quant:bits=4,block=32"},
             {8, "quant:bits=2,block=64"},
             {9, "quant:bits=3,block=64,rounding=stochastic"},
             {10, "quant:bits=5,block=128"},
             {11, "quant:bits=6,block=32"},
             {12, "quant:bits=7,block=2048"},
             {13, "mx:format=fp8_e4m3"},
             {14, "mx:format=fp8_e5m2,scale=ceil"},
             {15, "mx:format=fp6_e2m3"},
             {16, "mx:format=fp6_e3m2"},
             {17, "mx:format=fp4_e2m1"},
             {18, "mx:format=nvfp4"},
             {19, "sign:block=32"},
             {20, "sign:block=2048"},
             {23, "eden:bits=2,size=1024"},
             {24, "eden:bits=1,size=64,scale=mmse"},
             {25, "eden:bits=3,size=64"},
             {26, "eden:bits=4,size=4096"},
             {30, "lossless:dtype=float32"},
             {31, "lossless:dtype=bfloat16"},
             {34, "topk:density=0.01"},
             {36, "topk:density=0.05,values=int8,indices=int12"},
             {37, "topk:density=0.3,values=bins2,indices=int12"}}) {
      (*made)[number] = pycomm::make_codec(spec);
    }
    return made;
  }();
  return *all;
}

// On the heap and of the exact size, so that the sanitizer sees every byte beyond.
template <typename T>
std::unique_ptr<T[]> exact(size_t count) {
  return std::unique_ptr<T[]>(new T[count]());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Reader reader(data, size);
  const auto& named = codecs()[reader.byte() % kNumbers];
  if (named == nullptr) return 0;
  const Codec& codec = *named;
  size_t numel = reader.byte();
  numel = (numel | static_cast<size_t>(reader.byte()) << 8) % kMostValues;
  const size_t bytes = codec.encoded_bytes(numel);
  const auto payload = exact<uint8_t>(bytes);
  const auto given = reader.take(bytes);
  if (!given.empty()) std::memcpy(payload.get(), given.data(), given.size());
  const auto values = exact<float>(numel);
  codec.decode({payload.get(), bytes}, {values.get(), numel}, {});
  codec.decode({payload.get(), bytes}, {values.get(), numel}, {}, true);
  return 0;
}
