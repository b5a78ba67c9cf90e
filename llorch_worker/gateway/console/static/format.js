// Numbers as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export const count = (number) => whole.format(number);

export const rate = (number) => (number < 100 ? tenth : whole).format(number);

export function counted(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

export function percent(share) {
  return share === null ? "–" : `${whole.format(100 * share)}%`;
}

/** 850 ms, 2.4 s, 5 min, 3 h, 2 d. */
export function duration(ms) {
  if (ms < 1000) return `${whole.format(ms)} ms`;
  const seconds = ms / 1000;
  if (seconds < 60) return `${(seconds < 10 ? tenth : whole).format(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

/** How long ago a Unix time in seconds was, by this machine's clock. */
export function ago(unixSeconds) {
  const ms = Date.now() - 1000 * unixSeconds;
  return ms < 2000 ? "now" : `${duration(ms)} ago`;
}

export function bytes(number) {
  if (number < 1024) return `${number} B`;
  if (number < 1024 ** 2) return `${tenth.format(number / 1024)} KiB`;
  if (number < 1024 ** 3) return `${tenth.format(number / 1024 ** 2)} MiB`;
  return `${tenth.format(number / 1024 ** 3)} GiB`;
}

/** The first group of a UUID; other ids as they are. */
export const shortId = (id) => (/^[0-9a-f]{8}-[0-9a-f-]{27}$/.test(id) ? id.slice(0, 8) : id);
