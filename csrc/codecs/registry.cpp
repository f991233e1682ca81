// Registry of codecs: the only list of them in C++, one line each.
#include "codecs/base/registry.h"

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

}  // namespace

std::unique_ptr<Codec> make_codec(std::string_view spec) {
  const DefaultArithmetic arithmetic;  // numbers in a spec are rounded too
  const std::string_view name = spec.substr(0, spec.find(':'));
  spec.remove_prefix(name.size() < spec.size() ? name.size() + 1 : name.size());
  std::string known;
  for (const Entry& entry : kCodecs) {
    if (entry.name == name) {
      codecs::Options options(name, spec);
      return entry.make(options);
    }
    known += (known.empty() ? "" : ", ") + std::string(entry.name);
  }
  throw Error("unknown codec \"" + std::string(name) + "\": use one of " + known);
}

std::vector<std::string> codec_names() {
  std::vector<std::string> names;
  for (const Entry& entry : kCodecs) names.emplace_back(entry.name);
  return names;
}

}  // namespace pycomm
