#include "weft/comm/ucx/rendezvous.h"

#include <c10/util/Exception.h>
#include <sys/random.h>

#include <cstring>
#include <exception>

#include "weft/comm/bounded_call.h"
#include "weft/comm/roll_call.h"

namespace weft::comm::ucx {
namespace {

/// The head of a rank's record; its address follows, or the reason why it has none.
struct Head {
  std::array<char, 8> magic{'w', 'e', 'f', 't', '-', 'u', 'c', 'x'};
  uint32_t format = kFormat;
  uint32_t has_address = 0;
  Token part{};
};

Token random_token() {
  Token token{};
  const auto got = getrandom(token.data(), sizeof(token), 0);
  if (got != sizeof(token)) C10_THROW_ERROR(DistError, "No random bytes for the token of a network link.");
  return token;
}

std::string record(const Head& head, const std::string& text) {
  return std::string(reinterpret_cast<const char*>(&head), sizeof(head)) + text;
}

/// Puts rank `r`'s record into `all`.
void read(const UcxOptions& options, int r, const std::string& bytes, Introduction& all) {
  Head head{};
  const auto expected = head.magic;
  const bool whole = bytes.size() > sizeof(head) && bytes.size() < (1 << 20);
  if (whole) std::memcpy(&head, bytes.data(), sizeof(head));
  if (!whole || head.magic != expected || head.format != kFormat) {
    C10_THROW_ERROR(DistError,
                    c10::str("ucx link of group '", options.group, "': rank ", r,
                             " speaks another format (this rank: ", kFormat, "). Run the same weft everywhere."));
  }
  auto text = bytes.substr(sizeof(head));
  if (!head.has_address)
    C10_THROW_ERROR(DistError, c10::str("ucx link of group '", options.group, "': rank ", r, " failed: ", text));
  all.addresses[r] = std::move(text);
  all.token[0] ^= head.part[0];
  all.token[1] ^= head.part[1];
}

}  // namespace

Introduction introduce(const UcxOptions& options, const std::function<std::string()>& address) {
  RollCall roll{"weft/ucx", options.rank, options.size, options.timeout};
  roll.prefix += c10::str("/", next_generation(options.store, roll));  // keys of an earlier link may still be there
  Introduction all{.addresses = std::vector<std::string>(options.size),
                   .key = c10::str(roll.prefix, "/", options.rank)};
  std::string mine;
  std::exception_ptr failed;
  try {
    mine = record({.has_address = 1, .part = random_token()}, address());
  } catch (const std::exception& error) {
    mine = record({.has_address = 0}, error.what());
    failed = std::current_exception();
  }
  const auto records = call_roll(options.store, roll, mine);
  if (failed) std::rethrow_exception(failed);
  for (int r = 0; r < options.size; ++r) read(options, r, records[r], all);
  return all;
}

void forget(const UcxOptions& options, const Introduction& introduction) {
  finish_by(std::chrono::steady_clock::now() + options.timeout, [store = options.store, key = introduction.key] {
    try {
      store->deleteKey(key);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): some stores cannot
    }
  });
}

}  // namespace weft::comm::ucx
