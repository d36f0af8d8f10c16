// What all parts share: elements, numbers in words, colours, keys. Whatever clients or models have
// written becomes text of an element here, never markup.

export const $ = (id) => document.getElementById(id);

export function el(tag, kind = "", text = "") {
	const made = document.createElement(tag);
	if (kind) made.className = kind;
	if (text !== "") made.textContent = text;
	return made;
}

export function button(text, act, kind = "quiet") {
	const made = el("button", kind, text);
	made.type = "button";
	made.addEventListener("click", act);
	return made;
}

export const num = (value) => Math.round(value).toLocaleString("en");

export function short(value) {
	if (value >= 1e6) return (value / 1e6).toFixed(1) + " M";
	if (value >= 1e4) return (value / 1e3).toFixed(1) + " k";
	return value >= 100 || Number.isInteger(value) ? num(value) : value.toFixed(1);
}

export function bytes(value) {
	if (value >= 1e9) return (value / 1e9).toFixed(1) + " GB";
	return (value / 1e6).toFixed(value >= 1e7 ? 0 : 1) + " MB";
}

export function span(seconds) {
	if (seconds < 10) return seconds.toFixed(1) + " s";
	if (seconds < 120) return seconds.toFixed(0) + " s";
	if (seconds < 7200) return Math.floor(seconds / 60) + " min";
	if (seconds < 172800) return Math.floor(seconds / 3600) + " h " + Math.floor((seconds % 3600) / 60) + " min";
	return Math.floor(seconds / 86400) + " days";
}

export const plural = (count, word) => `${num(count)} ${word}${count === 1 ? "" : "s"}`;

export const brief = (rid) => (rid.length > 17 ? rid.slice(0, 8) + "…" + rid.slice(-7) : rid);

// The same user has the same hue.
export function hue(name) {
	let sum = 7;
	for (const sign of name) sum = (sum * 31 + sign.codePointAt(0)) % 3600;
	return (sum * 47) % 360;
}

// ---- canvases

let colours = {};

export function colour(name) {
	if (!colours[name]) {
		const probe = el("i");
		probe.style.color = `var(--${name})`;
		document.body.append(probe);
		colours[name] = getComputedStyle(probe).color;
		probe.remove();
	}
	return colours[name];
}

export const forgetColours = () => { colours = {}; };

// A canvas in its own size, empty: [drawing, width, height] in pixels of the page.
export function clear(canvas) {
	const ratio = window.devicePixelRatio || 1;
	const width = canvas.clientWidth;
	const height = canvas.clientHeight;
	if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
		canvas.width = Math.round(width * ratio);
		canvas.height = Math.round(height * ratio);
	}
	const drawing = canvas.getContext("2d");
	drawing.setTransform(ratio, 0, 0, ratio, 0, 0);
	drawing.clearRect(0, 0, width, height);
	return [drawing, width, height];
}

export const isCalm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

// ---- keys: for this tab alone, and gone with it

export const keyOf = (kind) => sessionStorage.getItem("weft-" + kind) || "";

export function keepKey(kind, key) {
	if (key) sessionStorage.setItem("weft-" + kind, key);
	else sessionStorage.removeItem("weft-" + kind);
}

export function headers(kind) {
	const key = keyOf(kind) || (kind === "admin" ? keyOf("user") : keyOf("admin"));
	return key ? { authorization: "Bearer " + key } : {};
}

// What a server says went wrong.
export async function reason(answer) {
	let said = "";
	try {
		const body = await answer.json();
		said = body.error?.message || "";
	} catch { /* it was no JSON */ }
	return said || `the server answered ${answer.status}`;
}

export async function copy(text, from) {
	const before = from.textContent;
	try {
		await navigator.clipboard.writeText(text);
		from.textContent = "Copied";
	} catch {
		from.textContent = "Not allowed";
	}
	setTimeout(() => { from.textContent = before; }, 1500);
}
