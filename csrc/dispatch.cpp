// Chooses the instruction set once, at the first call.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "problem.h"

namespace levelhead {
namespace portable { extern const Kernels table; }
#if defined(__x86_64__)
namespace avx2 { extern const Kernels table; }
#endif

namespace {

const Kernels& choose() {
  const Kernels* best = &portable::table;
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  if (has_avx2) best = &avx2::table;
#else
  const bool has_avx2 = false;
#endif
  const char* wish = std::getenv("LEVELHEAD_ISA");
  if (!wish || !*wish) return *best;
  const std::string name = wish;
  if (name == "portable") return portable::table;
#if defined(__x86_64__)
  if (name == "avx2" && has_avx2) return avx2::table;
#endif
  throw std::invalid_argument("LEVELHEAD_ISA: expected 'portable'" +
                              std::string(has_avx2 ? " or 'avx2'" : " (all this CPU runs)") +
                              ", got '" + name + "'");
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace levelhead
