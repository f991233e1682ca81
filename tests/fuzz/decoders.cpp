// Payloads that hold anything, for every codec: no decoder leaves its memory.
//
// Input: codec, number of values (two bytes), payload.
#include <cstring>
#include <memory>

#include "codecs/base/codec.h"
#include "tests/fuzz/target.h"

namespace {

using pycomm::Codec;

constexpr size_t kMostValues = 5000;

const std::vector<std::unique_ptr<Codec>>& codecs() {
  static const auto* all = [] {
    auto* made = new std::vector<std::unique_ptr<Codec>>;
    for (const char* spec : {"cast:dtype=float32",
                             "cast:dtype=float16",
                             "cast:dtype=bfloat16",
                             "cast:dtype=float8_e4m3,block=256",
                             "cast:dtype=float8_e5m2,block=32",
                             "quant:bits=8,block=256",
                             "quant:bits=4,block=32",
                             "quant:bits=4,rounding=correlated",
                             "quant:bits=2,block=64,range=minmax,scale=bfloat16",
                             "quant:bits=3,block=64,rounding=stochastic,scale=bfloat16",
                             "quant:bits=5,block=128,range=minmax",
                             "quant:bits=6,block=32,scale=bfloat16",
                             "quant:bits=7,block=2048",
                             "mx:format=fp8_e4m3",
                             "mx:format=fp8_e5m2,scale=ceil",
                             "mx:format=fp6_e2m3",
                             "mx:format=fp6_e3m2",
                             "mx:format=fp4_e2m1",
                             "mx:format=nvfp4",
                             "sign:block=32",
                             "sign:block=2048",
                             "rotate:size=64+quant:bits=8,block=256",
                             "rotate:size=1024+quant:bits=4,block=128",
                             "eden:bits=2,size=1024",
                             "eden:bits=1,size=64,scale=mmse",
                             "eden:bits=0.5,size=64",
                             "eden:bits=3.5,size=4096",
                             "eden:bits=8,size=1024",
                             "ternary:ranks=7,block=2048",
                             "ternary:ranks=127,block=64",
                             "lossless:dtype=float32",
                             "lossless:dtype=bfloat16",
                             "randomk:every=10",
                             "randomk:every=7,block=32",
                             "topk:density=0.01",
                             "topk:density=0.05,values=int8,indices=int12",
                             "topk:density=0.3,values=bins2,indices=int12"}) {
      made->push_back(pycomm::make_codec(spec));
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
  const Codec& codec = *codecs()[reader.byte() % codecs().size()];
  size_t numel = reader.byte();
  numel = (numel | static_cast<size_t>(reader.byte()) << 8) % kMostValues;
  const size_t bytes = codec.encoded_bytes(numel);
  const auto payload = exact<uint8_t>(bytes);
  const auto given = reader.take(bytes);
  if (!given.empty()) std::memcpy(payload.get(), given.data(), given.size());
  const auto values = exact<float>(numel);
  codec.decode({payload.get(), bytes}, {values.get(), numel}, {});
  codec.decode_add({payload.get(), bytes}, {values.get(), numel}, {});
  return 0;
}

std::vector<std::string> seeds() {
  std::vector<std::string> result;
  for (size_t c = 0; c < codecs().size(); c++) {
    for (const size_t numel : {0, 1, 300}) {
      const Codec& codec = *codecs()[c];
      std::vector<float> in(numel);
      uint32_t state = 1;
      for (float& x : in) {
        state = state * 1664525 + 1013904223;
        x = static_cast<float>(static_cast<int32_t>(state)) * 1e-9f;
      }
      // What ranks agree on, a number for each granule: ours alone.
      std::vector<float> amax(numel + 1);
      if (codec.needs_amax()) {
        const size_t granules = (numel + codec.granule() - 1) / codec.granule();
        codec.compute_amax({in.data(), numel}, nullptr, {amax.data(), granules}, {});
      }
      std::string payload(codec.encoded_bytes(numel), '\0');
      pycomm::EncodeArgs args;
      args.in = {in.data(), numel};
      args.out = {reinterpret_cast<uint8_t*>(payload.data()), payload.size()};
      args.amax = amax.data();
      codec.encode(args);
      result.push_back(
          {static_cast<char>(c), static_cast<char>(numel & 255), static_cast<char>(numel >> 8)});
      result.back() += payload;
    }
  }
  return result;
}
