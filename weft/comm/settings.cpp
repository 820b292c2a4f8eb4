#include "weft/comm/settings.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <limits>
#include <string_view>

namespace weft::comm {

int64_t checked_collectives() {
  const char* value = std::getenv("WEFT_CHECK");
  const std::string_view check = value ? value : "always";
  TORCH_CHECK_VALUE(check == "first" || check == "always", "WEFT_CHECK is '", check, "', expected first or always.");
  return check == "always" ? std::numeric_limits<int64_t>::max() : 100;
}

std::optional<std::chrono::milliseconds> timeout_from_env() {
  const char* value = std::getenv("WEFT_TIMEOUT");
  if (!value) return std::nullopt;
  char* end = nullptr;
  const double seconds = std::strtod(value, &end);
  TORCH_CHECK_VALUE(end != value && *end == 0 && seconds >= 0.001 && seconds < 1e9, "WEFT_TIMEOUT is '", value,
                    "', expected a number of seconds, at least 0.001.");
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

std::string transport_from_env() {
  const char* value = std::getenv("WEFT_TRANSPORT");
  const std::string_view transport = value ? value : "";
  TORCH_CHECK_VALUE(transport.empty() || transport == "shm" || transport == "ucx" || transport == "plain",
                    "WEFT_TRANSPORT is '", transport, "', expected shm, ucx or plain.");
  return std::string(transport);
}

bool ucx_trusted() {
  const char* value = std::getenv("WEFT_UCX_TRUSTED");
  const std::string_view trusted = value ? value : "";
  TORCH_CHECK_VALUE(trusted.empty() || trusted == "0" || trusted == "1", "WEFT_UCX_TRUSTED is '", trusted,
                    "', expected 0 or 1.");
  return trusted == "1";
}

}  // namespace weft::comm
