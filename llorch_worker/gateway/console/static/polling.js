// Asks again and again, while somebody looks.

const LONGEST_PAUSE_MS = 15000;

export class Polling {
  /** `look` is async. `onLink(ok, error)` hears how each call went. */
  constructor(look, intervalMs, onLink = () => {}) {
    this.look = look;
    this.intervalMs = intervalMs;
    this.onLink = onLink;
    this.running = false;
    this.asking = false;
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden && this.running) this.now();
    });
  }

  start() {
    this.running = true;
    this.pauseMs = this.intervalMs;
    this.now();
  }

  stop() {
    this.running = false;
    clearTimeout(this.timer);
  }

  /** Asks at once, and goes on from there. */
  async now() {
    clearTimeout(this.timer);
    if (this.asking) return;
    this.asking = true;
    try {
      await this.look();
      this.pauseMs = this.intervalMs;
      this.onLink(true);
    } catch (error) {
      this.pauseMs = Math.min(2 * this.pauseMs, LONGEST_PAUSE_MS);
      this.onLink(false, error);
    } finally {
      this.asking = false;
    }
    if (this.running && !document.hidden) this.timer = setTimeout(() => this.now(), this.pauseMs);
  }
}
