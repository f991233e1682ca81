// Registry of codecs: the only list of them in C++, one line each, and the only one of short names.
#include <algorithm>

#include "codecs/base/options.h"
#include "core/arithmetic.h"
#include "core/error.h"

// clang-format off: one line each, so that codecs can be added without conflicts.
#define PYCOMM_CODECS(CODEC) \
  CODEC(cast) \
  CODEC(eden) \
  CODEC(lossless) \
  CODEC(mx) \
  CODEC(quant) \
  CODEC(sign) \
  CODEC(topk) \
  // end of the list
// clang-format on

namespace pycomm {

#define DECLARE(name)      \
  namespace codecs::name { \
  Maker make;              \
  }
PYCOMM_CODECS(DECLARE)
#undef DECLARE

namespace {

struct Entry {
  std::string_view name;
  codecs::Maker* make;
};

#define ENTRY(name) {#name, codecs::name::make},
constexpr Entry kCodecs[] = {PYCOMM_CODECS(ENTRY)};
#undef ENTRY

// Of two names for one text, the first is the one that is printed.
constexpr CodecAlias kAliases[] = {
    {"int8", "quant", "bits=8"},
    {"int7", "quant", "bits=7"},
    {"int6", "quant", "bits=6"},
    {"int5", "quant", "bits=5"},
    {"int4", "quant", "bits=4"},
    {"int3", "quant", "bits=3"},
    {"int2", "quant", "bits=2"},
    {"fp32", "cast", "dtype=float32"},
    {"none", "cast", "dtype=float32"},
    {"fp16", "cast", "dtype=float16"},
    {"bf16", "cast", "dtype=bfloat16"},
    {"fp8", "cast", "dtype=float8_e4m3"},
    {"fp8_e4m3", "cast", "dtype=float8_e4m3"},
    {"fp8_e5m2", "cast", "dtype=float8_e5m2"},
    {"mxfp8", "mx", "format=fp8_e4m3"},
    {"mxfp8_e5m2", "mx", "format=fp8_e5m2"},
    {"mxfp6", "mx", "format=fp6_e2m3"},
    {"mxfp6_e3m2", "mx", "format=fp6_e3m2"},
    {"mxfp4", "mx", "format=fp4_e2m1"},
    {"nvfp4", "mx", "format=nvfp4"},
    {"drive", "eden", "bits=1"},
    {"eden2", "eden", "bits=2"},
};

}  // namespace

std::unique_ptr<Codec> make_codec(std::string_view spec) {
  const DefaultArithmetic arithmetic;  // numbers in a spec are rounded too
  std::string_view name = spec.substr(0, spec.find(':'));
  spec.remove_prefix(name.size() < spec.size() ? name.size() + 1 : name.size());
  std::string text(spec);
  for (const CodecAlias& alias : kAliases) {
    if (alias.name != name) continue;
    name = alias.codec;
    text = std::string(alias.option) + (text.empty() ? "" : ",") + text;
    break;
  }
  for (const Entry& entry : kCodecs) {
    if (entry.name != name) continue;
    codecs::Options options(name, text);
    return entry.make(options);
  }
  std::vector<std::string> known = codec_names();
  for (const CodecAlias& alias : kAliases) known.emplace_back(alias.name);
  std::sort(known.begin(), known.end());
  throw Error("unknown codec \"" + std::string(name) + "\": the codecs are " + codecs::join(known));
}

std::vector<CodecAlias> codec_aliases() { return {std::begin(kAliases), std::end(kAliases)}; }

std::vector<std::string> codec_names() {
  std::vector<std::string> names;
  for (const Entry& entry : kCodecs) names.emplace_back(entry.name);
  return names;
}

}  // namespace pycomm
