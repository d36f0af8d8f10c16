// Formulas in TeX as MathML, which browsers draw themselves. Of what the library makes, only the
// elements, attributes and styles of these lists become part of the page.

import { el } from "../parts.js";

const LONGEST = 5_000; // characters
const LIMITS = { maxExpand: 500, maxSize: [20, 200], trust: false, throwOnError: true }; // em and points
const SPACE = "http://www.w3.org/1998/Math/MathML";
const words = (text) => new Set(text.split(" "));
const TAGS = words("math mrow mi mn mo ms mtext mspace msup msub msubsup mfrac msqrt mroot mover munder munderover mtable mtr mtd mstyle mpadded mphantom menclose merror mmultiscripts mprescripts none");
const ATTRIBUTES = words("display displaystyle scriptlevel mathvariant mathsize mathcolor mathbackground stretchy symmetric largeop movablelimits fence separator form accent accentunder lspace rspace minsize maxsize width height depth voffset linethickness columnalign rowspacing columnspacing columnlines rowlines columnspan rowspan notation");
const STYLES = words("width height padding paddingTop paddingRight paddingBottom paddingLeft marginLeft color backgroundColor border borderTop borderRight borderBottom borderLeft textAlign fontWeight mathDepth");

let library = null;

const loaded = () => library ??= import("../vendor/temml.js").then((found) => found.default);

export function math(tex, isBlock) {
	const box = el(isBlock ? "div" : "span", "math", el("code", "", tex));
	if (tex.length > LONGEST) return box;
	loaded().then((library) => {
		const formula = made(library.__renderToMathMLTree(tex, { ...LIMITS, displayMode: isBlock }));
		formula.setAttribute("aria-label", tex);
		box.replaceChildren(formula);
	}).catch(() => {}); // it stays as it was written
	return box;
}

function made({ type, attributes = {}, style = {}, classes = [], children = [], text }) {
	if (text !== undefined) return text;
	const inner = children.map(made);
	if (!TAGS.has(type)) {
		const plain = document.createDocumentFragment();
		plain.append(...inner);
		return plain;
	}
	const node = document.createElementNS(SPACE, type);
	for (const [name, value] of Object.entries(attributes)) if (ATTRIBUTES.has(name)) node.setAttribute(name, value);
	for (const [name, value] of Object.entries(style)) if (STYLES.has(name)) node.style[name] = value;
	const kept = classes.filter((name) => /^tml-/.test(name));
	if (kept.length) node.setAttribute("class", kept.join(" "));
	node.append(...inner);
	return node;
}
