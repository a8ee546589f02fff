// Numbers and times in words, as the terminal says them.

export function number(value, digits = 3) {
  return value === null || value === undefined || Number.isNaN(value) ? "–" : value.toFixed(digits);
}

export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds)), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  const two = (part) => String(part).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

export function pace(seconds) {
  return seconds < 10 ? `${seconds.toFixed(1)} s` : seconds < 120 ? `${Math.round(seconds)} s` : duration(seconds);
}

export function ago(seconds) {
  if (seconds < 1.5) return "now";
  if (seconds < 100) return `${Math.round(seconds)} s ago`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min ago`;
  return seconds < 48 * 3600 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
}

export function clock(seconds, withSeconds = false) {
  const at = new Date(seconds * 1000), two = (part) => String(part).padStart(2, "0");
  const time = `${two(at.getHours())}:${two(at.getMinutes())}${withSeconds ? `:${two(at.getSeconds())}` : ""}`;
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return at.toDateString() === new Date().toDateString() ? time : `${day} ${time}`;
}

export function size(count) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 999.5) return count < 10 && unit !== "B" ? `${count.toFixed(1)} ${unit}` : `${Math.round(count)} ${unit}`;
    count /= 1000;
  }
  return `${count.toFixed(1)} TB`;
}

export const organ = (name) => name.replaceAll("_", " ");

export const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
