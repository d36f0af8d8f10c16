// The text of a PDF: objects, compressed streams, fonts with tables to Unicode, and the operators
// that show text. It knows nothing of pictures, forms, or encrypted files. A worker, because
// a large file takes seconds.
// Source: ISO 32000-1, sections 7.3, 7.5, 9.4 and 9.10.

const NAMES = { space: " ", hyphen: "-", period: ".", comma: ",", colon: ":", semicolon: ";", quoteright: "’", quoteleft: "‘", quotedblleft: "“", quotedblright: "”", endash: "–", emdash: "—", bullet: "•", fi: "fi", fl: "fl", ff: "ff", ffi: "ffi", parenleft: "(", parenright: ")", slash: "/", question: "?", exclam: "!", ampersand: "&", percent: "%", plus: "+", equal: "=" };
const MOST_INFLATED = 64e6; // bytes of all streams
const DAMAGED = "the PDF is damaged: nothing of it can be read";
const latin = new TextDecoder("latin1");

async function textOfPdf(bytes) {
	const file = new File(bytes);
	if (/\/Encrypt\s*(?:\d+\s+\d+\s+R|<<)/.test(file.text)) throw new Error("the PDF is encrypted: print it to a file, and attach that");
	await file.unpack();
	const texts = [];
	for (const page of file.pages()) texts.push(await file.textOf(page));
	const text = texts.join("\n\n").replace(/[ \t]+\n/g, "\n").replace(/\n{3,}/g, "\n\n").trim();
	if (!text) throw new Error(file.isDamaged ? DAMAGED : "the PDF has no text, perhaps only pictures of pages");
	return { text, isDamaged: file.isDamaged };
}

onmessage = async ({ data }) => postMessage(await textOfPdf(data).catch(({ message }) => ({ error: message })));

class File {
	#objects = new Map(); // the text of each object by its number
	#fonts = new Map();
	#left = MOST_INFLATED;

	constructor(bytes) {
		const text = latin.decode(bytes);
		Object.assign(this, { bytes, text });
		this.isDamaged = !text.slice(-1_024).includes("%%EOF");
		const heads = [...text.matchAll(/(\d{1,10})\s+\d{1,5}\s+obj\b/g)];
		for (const [i, { 0: head, 1: number, index }] of heads.entries()) {
			const from = index + head.length;
			this.#objects.set(number, { from, body: text.slice(from, heads[i + 1]?.index).split("endobj")[0] });
		}
	}

	// Objects in compressed streams.
	async unpack() {
		for (const [number, { body }] of [...this.#objects]) {
			if (!/\/Type\s*\/ObjStm\b/.test(body)) continue;
			const inside = await this.#stream(number);
			const first = Number(body.match(/\/First\s+(\d+)/)?.[1]);
			const heads = inside.slice(0, first).trim().split(/\s+/).map(Number);
			for (let i = 0; i + 1 < heads.length; i += 2) {
				const next = heads[i + 3];
				this.#objects.set(String(heads[i]), { body: inside.slice(first + heads[i + 1], next === undefined ? undefined : first + next) });
			}
		}
	}

	pages() {
		const root = [...this.#objects.values()].find(({ body }) => /\/Type\s*\/Catalog\b/.test(body));
		const found = [];
		const seen = new Set();
		const walk = (number, above) => {
			const body = this.#body(number);
			if (!body || seen.has(number)) return;
			seen.add(number);
			const resources = this.#value(body, "Resources") || above;
			const kids = this.#value(body, "Kids");
			if (kids) for (const [, kid] of kids.matchAll(/(\d+)\s+\d+\s+R/g)) walk(kid, resources);
			else if (/\/Type\s*\/Page\b/.test(body)) found.push({ body, resources: resources || "" });
		};
		const top = root?.body.match(/\/Pages\s+(\d+)/)?.[1];
		if (top) walk(top, "");
		if (!found.length) throw new Error(DAMAGED);
		return found;
	}

	#body(number) {
		return this.#objects.get(number)?.body || "";
	}

	async textOf({ body, resources }) {
		const contents = body.match(/\/Contents\s*(\[[^\]]*\]|\d+\s+\d+\s+R)/)?.[1] || "";
		const parts = [];
		for (const [, number] of contents.matchAll(/(\d+)\s+\d+\s+R/g)) {
			const direct = this.#body(number).trim();
			if (direct.startsWith("[")) for (const [, inner] of direct.matchAll(/(\d+)\s+\d+\s+R/g)) parts.push(await this.#stream(inner));
			else parts.push(await this.#stream(number));
		}
		const fonts = new Map();
		const table = this.#value(resources, "Font") || "";
		for (const [, name, number] of table.matchAll(/\/([^\s/<>[\]]+)\s+(\d+)\s+\d+\s+R/g)) fonts.set(name, await this.#font(number));
		return shown(parts.join("\n"), fonts);
	}

	// The value of a name in a dictionary, through references.
	#value(body, name) {
		const found = body.match(new RegExp(`/${name}(?![A-Za-z])\\s*`));
		if (!found) return "";
		const rest = body.slice(found.index + found[0].length);
		const reference = rest.match(/^(\d+)\s+\d+\s+R/);
		if (reference) return this.#body(reference[1]);
		const sign = rest.startsWith("<<") ? ["<<", ">>"] : ["[", "]"];
		if (!rest.startsWith(sign[0])) return rest.match(/^[^\s/>\]]+/)?.[0] || "";
		let depth = 0;
		for (let i = 0; i < rest.length; i++) {
			if (rest.startsWith(sign[0], i)) depth++;
			else if (rest.startsWith(sign[1], i) && --depth === 0) return rest.slice(0, i + sign[1].length);
		}
		return rest;
	}

	async #stream(number) {
		const { from, body } = this.#objects.get(number) || {};
		const start = body?.match(/stream\r?\n/);
		if (!start || from === undefined) return "";
		const begin = from + start.index + start[0].length;
		const head = body.slice(0, start.index);
		const length = Number(this.#value(head, "Length"));
		const marked = this.text.indexOf("endstream", begin);
		const isGiven = length > 0 && /^\s*endstream/.test(this.text.slice(begin + length, begin + length + 20));
		let packed = this.bytes.subarray(begin, isGiven ? begin + length : marked);
		if (head.includes("/ASCII85Decode")) packed = unpacked85(latin.decode(packed));
		return head.includes("/FlateDecode") ? this.#inflate(packed) : latin.decode(packed);
	}

	async #inflate(packed) {
		const reader = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate")).getReader();
		let text = "";
		try {
			for (;;) {
				const { value, done } = await reader.read();
				if (done) break;
				this.#left -= value.length;
				if (this.#left < 0) throw new Error("too large");
				text += latin.decode(value);
			}
		} catch {
			if (this.#left < 0) throw new Error(`the PDF is larger than ${MOST_INFLATED / 1e6} MB when it is unpacked`);
			this.isDamaged = true;
		}
		return text;
	}

	async #font(number) {
		if (!this.#fonts.has(number)) this.#fonts.set(number, await this.#read(this.#body(number)));
		return this.#fonts.get(number);
	}

	async #read(body) {
		const wide = /\/Subtype\s*\/Type0\b/.test(body);
		const table = body.match(/\/ToUnicode\s+(\d+)/)?.[1];
		const codes = table ? toUnicode(await this.#stream(table)) : differences(this.#value(this.#value(body, "Encoding"), "Differences"));
		const widths = wide ? this.#wideWidths(body) : this.#widths(body);
		return { wide, codes, widths };
	}

	#widths(body) {
		const first = Number(this.#value(body, "FirstChar")) || 0;
		const listed = this.#value(body, "Widths").match(/[-\d.]+/g) || [];
		return new Map(listed.map((width, i) => [first + i, Number(width)]));
	}

	// [code [width …] code code width …]
	#wideWidths(body) {
		const below = body.match(/\/DescendantFonts\s*\[?\s*(\d+)/)?.[1];
		const inner = this.#body(below);
		const child = inner.match(/^\s*\[\s*(\d+)/) ? this.#body(inner.match(/(\d+)/)[1]) : inner;
		const widths = new Map([["other", Number(this.#value(child, "DW")) || 1_000]]);
		for (const [, first, list, last, width] of this.#value(child, "W").slice(1).matchAll(/(\d+)\s*(?:\[([^\]]*)\]|\s(\d+)\s+([-\d.]+))/g)) {
			if (list !== undefined) (list.match(/[-\d.]+/g) || []).forEach((one, i) => widths.set(Number(first) + i, Number(one)));
			else for (let code = Number(first); code <= Math.min(Number(last), Number(first) + 0xffff); code++) widths.set(code, Number(width));
		}
		return widths;
	}
}

// Five signs for four bytes.
function unpacked85(text) {
	const signs = text.split("~")[0].replace(/\s/g, "").replaceAll("z", "!!!!!");
	const bytes = [];
	for (const [group] of signs.matchAll(/.{1,5}/g)) {
		const value = [...group.padEnd(5, "u")].reduce((sum, sign) => sum * 85 + sign.charCodeAt(0) - 33, 0);
		for (let i = 1; i < group.length; i++) bytes.push((value >>> (32 - 8 * i)) & 255);
	}
	return Uint8Array.from(bytes);
}

// ---- fonts

const text16 = (hex) => String.fromCharCode(...(hex.match(/.{4}/g) || []).map((part) => parseInt(part, 16)));

function toUnicode(map) {
	const codes = new Map();
	for (const [, part] of map.matchAll(/beginbfchar([\s\S]*?)endbfchar/g)) {
		for (const [, code, to] of part.matchAll(/<([\da-fA-F\s]+)>\s*<([\da-fA-F\s]*)>/g)) codes.set(parseInt(code, 16), text16(to));
	}
	for (const [, part] of map.matchAll(/beginbfrange([\s\S]*?)endbfrange/g)) {
		for (const [, low, high, to, list] of part.matchAll(/<([\da-fA-F]+)>\s*<([\da-fA-F]+)>\s*(?:<([\da-fA-F]+)>|\[([^\]]*)\])/g)) {
			const first = parseInt(low, 16);
			const last = Math.min(parseInt(high, 16), first + 0xffff);
			const listed = list?.match(/[\da-fA-F]+/g);
			const base = to ? text16(to) : "";
			for (let code = first; code <= last; code++) {
				if (listed) codes.set(code, text16(listed[code - first] || ""));
				else codes.set(code, base.slice(0, -1) + String.fromCharCode(base.charCodeAt(base.length - 1) + code - first));
			}
		}
	}
	return codes;
}

function differences(list) {
	const codes = new Map();
	let code = 0;
	for (const [sign] of list.matchAll(/\d+|\/[^\s/[\]]+/g)) {
		if (sign[0] !== "/") {
			code = Number(sign);
			continue;
		}
		const name = sign.slice(1);
		const hex = name.match(/^u(?:ni)?([\dA-F]{4,6})$/)?.[1];
		codes.set(code++, hex ? String.fromCodePoint(parseInt(hex, 16)) : NAMES[name] ?? (name.length === 1 ? name : ""));
	}
	return codes;
}

// ---- what is shown

const ESCAPES = { n: "\n", r: "\r", t: "\t", b: "\b", f: "\f" };

function bytesOf(token) {
	if (token[0] === "<") return (token.slice(1, -1).replace(/\s/g, "").match(/.{1,2}/g) || []).map((part) => parseInt(part.padEnd(2, "0"), 16));
	const plain = token.slice(1, -1).replace(/\\(?:([0-7]{1,3})|(\r?\n)|([\s\S]))/g, (_, octal, line, sign) => {
		if (octal) return String.fromCharCode(parseInt(octal, 8) & 255);
		return line ? "" : ESCAPES[sign] ?? sign;
	});
	return [...plain].map((sign) => sign.charCodeAt(0) & 255);
}

const AVERAGE = 500; // width of a sign that has none, in thousandths of an em

// The text of a string, and its width in thousandths of an em.
function decoded(token, font) {
	const bytes = bytesOf(token);
	const codes = font?.wide ? bytes.flatMap((byte, i) => (i % 2 ? [bytes[i - 1] * 256 + byte] : [])) : bytes;
	const other = font?.widths.get("other") ?? AVERAGE;
	let text = "";
	let width = 0;
	for (const code of codes) {
		text += font?.codes.get(code) ?? (font?.wide ? "" : WINDOWS[code]);
		width += font?.widths.get(code) ?? other;
	}
	return [text, width];
}

const WINDOWS = new TextDecoder("windows-1252").decode(Uint8Array.from({ length: 256 }, (_, code) => code));

const TOKEN = /\((?:\\[\s\S]|[^\\()]|\((?:\\[\s\S]|[^\\()])*\))*\)|<[\da-fA-F\s]*>|\[|\]|\/[^\s/<>[\]()]+|[-+.\d]+|[A-Za-z'"*]+/g;
const GAP = 0.16; // of an em: a wider gap inside of a line is a space

function shown(content, fonts) {
	let text = "";
	let font = null;
	let size = 1;
	let scale = 1;
	let leading = 0;
	let stack = [];
	let list = null;
	let start = [0, 0]; // of the line
	let end = null; // of what is shown
	const goTo = (x, y) => {
		start = [x, y];
		const em = Math.abs(size * scale) || 1;
		if (end && Math.abs(y - end[1]) > 0.3 * em) text += "\n";
		else if (end && x - end[0] > GAP * em && !/\s$/.test(text)) text += " ";
		end = [x, y];
	};
	const show = (token) => {
		const [words, width] = decoded(token, font);
		text += words;
		end ??= [...start];
		end[0] += (width / 1_000) * size * scale;
	};
	const operators = {
		Tf: () => {
			font = fonts.get(String(stack.at(-2)).slice(1)) ?? font;
			size = Number(stack.at(-1)) || 1;
		},
		TL: () => { leading = Number(stack.at(-1)); },
		Tm: () => {
			const [a, b, , , x, y] = stack.slice(-6).map(Number);
			scale = Math.hypot(a, b) || 1;
			goTo(x, y);
		},
		Td: () => goTo(start[0] + Number(stack.at(-2)) * scale, start[1] + Number(stack.at(-1)) * scale),
		TD: () => {
			leading = -Number(stack.at(-1));
			operators.Td();
		},
		"T*": () => goTo(start[0], start[1] - leading * scale),
		Tj: () => show(stack.at(-1)),
		"'": () => {
			operators["T*"]();
			operators.Tj();
		},
		'"': () => operators["'"](),
		TJ: () => {
			for (const part of stack.at(-1)) {
				if (/^[(<]/.test(part)) show(part);
				else {
					if (-Number(part) / 1_000 > GAP && !/\s$/.test(text)) text += " ";
					if (end) end[0] -= (Number(part) / 1_000) * size * scale;
				}
			}
		},
		BT: () => { start = [0, 0]; },
	};
	for (const [token] of content.matchAll(TOKEN)) {
		if (token === "[") list = [];
		else if (token === "]") {
			stack.push(list || []);
			list = null;
		} else if (list) list.push(token);
		else if (/^[(<[/\-+.\d]/.test(token)) stack.push(token);
		else {
			const act = Object.hasOwn(operators, token) && operators[token];
			if (act && (stack.length || token === "BT" || token === "T*")) act();
			stack = [];
		}
	}
	return text;
}
